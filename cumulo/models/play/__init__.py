"""Decoders for a device: fused on the CPU, kernels on a GPU."""
