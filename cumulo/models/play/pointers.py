"""pointer: the address of a tensor that native kernels read, checked to be what they expect."""

import torch
from torch import Tensor


def pointer(tensor: Tensor, dtype: torch.dtype) -> int:
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous {dtype} tensor, got {tensor.dtype} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()
