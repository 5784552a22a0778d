"""fp8: weights as e4m3 floats under a scale per row, matrix or block of 128 x 128 (DeepSeek-V3, section 3.3)."""

import torch
from torch import Tensor

from cumulo.models.files.quantised.matrices import Float8Matrix
from cumulo.quant.decide.recipe import FLOAT8_BLOCK, Float8Scheme

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def float8(weight: Tensor, scheme: Float8Scheme, input_scale: Tensor | None = None) -> Float8Matrix:
    """The largest weight under a scale becomes the largest float; `input_scale` goes with static activations."""
    rows, columns = weight.shape
    block = {
        "channel": (1, columns),
        "tensor": (rows, columns),
        "block": (FLOAT8_BLOCK, FLOAT8_BLOCK),
    }[scheme]
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scale = (tiles.abs().amax((1, 3)).float() / LARGEST).clamp_min(1e-12)
    codes = tiles / scale[:, None, :, None].to(weight.dtype)
    codes = codes.flatten(2).flatten(0, 1)[:rows, :columns].clamp(-LARGEST, LARGEST)
    return Float8Matrix(codes.to(torch.float8_e4m3fn), scale, block, input_scale)
