"""w4_weight: a matrix of 4-bit weights, of which 128 share a scale, as `w4` reads it, and how it is unpacked.

A word of 16 bits has four codes; the code in place j of words 0 to 31 belongs to column 32·j + word, so one place
of 32 words is a tile of neighbouring columns, which the tensor cores take as it is. 64 rows of 128 columns lie in
one piece of 4 KiB, which a program reads in one go.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

STEP = 128  # columns whose codes lie together, and that share a scale
TILE = 64  # rows likewise


@dataclass(frozen=True, slots=True)
class W4Weight:
    """A matrix [N, K] in 4 bits: w = scale·(code − 8).

    words [N/64, K/128, 64, 32] int16, scales [K/128, N] float32 (a group's scales lie together).
    """

    words: Tensor
    scales: Tensor

    @classmethod
    def quantised(cls, weight: Tensor) -> "W4Weight":
        """The nearest codes under scales from each group's extremes. Scales are kept in float32: the asynchronous
        copies that bring them with the codes move no less than four bytes."""
        n, k = weight.shape
        if k % STEP:
            raise ValueError(
                f"rows of {k} weights have no 4-bit GPU kernel: they must be a multiple of {STEP}"
            )
        groups = weight.float().view(n, k // STEP, STEP)
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        # The extreme gets code 0, the end of the range with one step more (as GGUF's Q4_0).
        scales = torch.where(extreme == 0, torch.full_like(extreme, 1e-12), extreme / -8)
        codes = (groups / scales[..., None] + 8).round().clamp(0, 15).to(torch.uint8).view(n, k)
        return cls.packed(codes, scales.t().contiguous())

    @classmethod
    def packed(cls, codes: Tensor, scales: Tensor) -> "W4Weight":
        """From codes [N, K] of 0..15 and scales [K/128, N]."""
        n, k = codes.shape
        codes = F.pad(codes, (0, 0, 0, -n % TILE)).view(-1, TILE, k // STEP, 4, 32)
        words = torch.zeros_like(codes[..., 0, :], dtype=torch.int16)
        for place in range(4):  # the last one reaches the sign, as it should
            words |= codes[..., place, :].to(torch.int16) << (4 * place)
        return cls(words.transpose(1, 2).contiguous(), scales)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.scales.shape[1], STEP * self.words.shape[1]))

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    def codes(self) -> Tensor:
        """[N, K] of 0..15."""
        n, k = self.shape
        rows = self.words.transpose(1, 2).reshape(-1, k // STEP, 1, 32)[:n]
        places = torch.arange(0, 16, 4, dtype=torch.int16, device=self.device).view(1, 1, 4, 1)
        return ((rows >> places) & 15).to(torch.uint8).reshape(n, k)

    def dequantised(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """The matrix [N, K]; of 16 bits by one pass over the codes. Float32 is for comparing: Triton 3.6 stores
        some of its rows wrongly on an H200."""
        n, k = self.shape
        if dtype == torch.float32 and out is None:
            codes = self.codes().float().view(n, k // STEP, STEP)
            return ((codes - 8) * self.scales.t()[..., None]).reshape(n, k)
        if out is None:
            out = torch.empty((n, k), dtype=dtype, device=self.device)
        _dequantise[(triton.cdiv(n, TILE), k // STEP)](self.words, self.scales, out, n, k)
        return out


_SCRATCH: dict[torch.device, Tensor] = {}


def reserve_scratch(weights: Iterable[W4Weight], dtype: torch.dtype) -> int:
    """Memory in which any of these can be unpacked, before a graph is captured that does so; returns its bytes."""
    for weight in weights:
        held = _SCRATCH.get(weight.device)
        if held is None or held.numel() < weight.shape.numel() or held.dtype != dtype:
            _SCRATCH[weight.device] = torch.empty(weight.shape.numel(), dtype=dtype, device=weight.device)
    return sum(held.nbytes for held in _SCRATCH.values())


def in_scratch(weight: W4Weight, dtype: torch.dtype) -> Tensor:
    """The matrix unpacked, in memory that the next one will overwrite."""
    held = _SCRATCH.get(weight.device)
    if held is None or held.dtype != dtype or held.numel() < weight.shape.numel():
        return weight.dequantised(dtype)
    return weight.dequantised(dtype, held[: weight.shape.numel()].view(weight.shape))


@triton.jit
def _dequantise(words, scales, out, N, K):
    tile, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inside, columns = tl.arange(0, 64), tl.arange(0, 32)
    rows = tile * 64 + inside
    mask = rows < N
    piece = words + (tile * (K // 128) + step) * 2048
    w = tl.load(piece + inside[:, None] * 32 + columns[None, :])
    for j in tl.static_range(4):
        scale = tl.load(scales + step * N + rows, mask=mask, other=0.0)[:, None]
        number = (((w >> (4 * j)) & 15).to(tl.float32) - 8) * scale
        places = out + rows[:, None] * K + step * 128 + 32 * j + columns[None, :]
        tl.store(places, number.to(out.dtype.element_ty), mask=mask[:, None])
