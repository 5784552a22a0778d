"""y = x Wᵀ with plain float32 weights, each token's result independent of the others. Used by the fused decoder.

Must move: 4 * rows * columns bytes of weights once per call; and compute rows * columns multiply-adds per token.
torch's own product is as fast, but how it rounds depends on how many tokens are in the call.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.kernels.cpu.library import FLOAT_LINEAR, OpStruct, StepStruct, native

SMALL_WORK = 50_000  # multiply-adds below which a second thread costs more than it brings


def float_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, columns] and weight [rows, columns], float32 -> [tokens, rows]."""
    library = native()
    rows, columns = weight.shape
    tensors = [x, weight] if bias is None else [x, weight, bias]
    suits = library is not None and columns % library.lanes == 0
    if not suits or any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors):
        return F.linear(x, weight, bias)
    assert library is not None
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty((len(x), rows), dtype=torch.float32)
    if len(x) == 0:
        return out
    op = OpStruct(
        kind=FLOAT_LINEAR,
        columns=columns,
        out_columns=rows,
        x=x.data_ptr(),
        out=out.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
    )
    threads = 1 if len(x) * rows * columns < SMALL_WORK else None
    library.play([op], StepStruct(tokens=len(x)), threads)
    return out
