"""Keys and values in 8 bits: how a KV cache on a CPU stores them, in torch. The native kernels do the same
(native/kv_codes.h).

int8: the numbers of one head and position share a scale, which follows them as four bytes. float8_e4m3fn: each
number by itself, at most 448 in size.
"""

import torch
from torch import Tensor

KV_FORMATS = {torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2}  # KvFormat in kv_codes.h
_SCALE_BYTES = 4
_LARGEST = 448.0


def stored_columns(columns: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that hold `columns` numbers of one head and position."""
    return columns + _SCALE_BYTES if dtype == torch.int8 and columns else columns


def columns_of(stored: Tensor) -> int:
    """Numbers of one head and position in a cache."""
    return stored.shape[-1] - (_SCALE_BYTES if stored.dtype == torch.int8 else 0)


def bytes_of(stored: Tensor) -> Tensor:
    """The same numbers as torch can gather and scatter them: it does neither with 8-bit floats."""
    return stored.view(torch.uint8) if stored.dtype == torch.float8_e4m3fn else stored


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., columns] -> [..., stored columns] of `dtype`."""
    if dtype == torch.float8_e4m3fn:
        return values.clamp(-_LARGEST, _LARGEST).to(dtype)
    if dtype != torch.int8:
        return values.to(dtype)
    scale = values.abs().amax(dim=-1, keepdim=True).float() / 127
    codes = torch.where(scale > 0, values.float() / scale, 0.0).round().to(torch.int8)
    return torch.cat((codes, scale.contiguous().view(torch.int8)), dim=-1)


def decode(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers again, in `dtype`."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    scale = stored[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-_SCALE_BYTES].float() * scale).to(dtype)
