"""GPU kernels in Triton, one file per operation: reference, kernel, and registration where training needs it.

Imported only where there is a GPU (or Triton's interpreter, in tests): nothing else in Cumulo needs Triton.
"""
