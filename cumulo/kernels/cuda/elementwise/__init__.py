"""Norms, rotations, SwiGLU and the inputs of a step."""
