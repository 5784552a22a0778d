"""Native kernels for CPUs, each with its reference."""
