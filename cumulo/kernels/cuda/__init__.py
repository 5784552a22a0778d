"""GPU kernels in Triton, one file per operation: reference, kernel, registration, bytes and FLOPs, benchmark rows.

Imported only where there is a GPU (or Triton's interpreter, in tests): nothing else in Cumulo needs Triton.
"""
