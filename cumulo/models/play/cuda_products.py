"""The products of the GPU decoder's half-layers: norm, matrix, bias and what adapters add, in as few launches as
the kernels allow. `CudaDecoder` and `CudaFeedForward` share one.

A half-layer's first product reads the normed stream, its second adds to the stream. A few tokens take the products
that stream weights and norm on the way; many take the matrix units, behind a norm of its own.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm
from cumulo.kernels.cuda.linear.linear import fuses, linear
from cumulo.kernels.cuda.linear.product import Weight
from cumulo.kernels.low_rank import AdapterGroups
from cumulo.layout.equal_sums import parts_of
from cumulo.models.play.cuda_adapters import CudaAdapters
from cumulo.models.play.cuda_slice import RankSlice
from cumulo.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of a step that have adapters."""

    groups: AdapterGroups
    apart: bool  # what adapters add is computed next to the products, and added by the kernels behind them


class StepProducts:
    """The products of steps of up to `max_tokens` tokens, and the buffer for their normed rows."""

    def __init__(
        self,
        spec: ModelSpec,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        invariant: bool,
        rank_slice: RankSlice | None,
        adapters: CudaAdapters | None,
        sum_parts: int,
    ) -> None:
        """`sum_parts`: in how many parts sums that ranks may share are added up, where it is invariant."""
        self._eps, self.invariant, self.slice, self._adapters = spec.norm_eps, invariant, rank_slice, adapters
        ranks = 1 if rank_slice is None else rank_slice.ranks
        self.sum_parts = sum_parts
        self._parts = parts_of(spec.heads * ranks, ranks, sum_parts) if invariant else 1
        self.buffer = torch.empty((max_tokens, spec.hidden), dtype=dtype, device=device)

    def adapted(
        self, groups: AdapterGroups | None, rows: int, may_be_apart: bool = True
    ) -> AdaptedRows | None:
        """Before the matrices of so many rows. Nothing is kept apart where bits must not depend on the number of
        rows: it is rounded once more."""
        if groups is None:
            return None
        assert self._adapters is not None
        apart = may_be_apart and not self.invariant and self._adapters.begin(rows)
        return AdaptedRows(groups, apart)

    def around(
        self, layer: int, name: str, x: Tensor, y: Tensor, adapted: AdaptedRows | None
    ) -> AbstractContextManager[Tensor | None]:
        """Around the product of a matrix, from x to y: adds what the rows' adapters make of x, or returns it
        where that is kept apart."""
        if adapted is None:
            return nullcontext()
        assert self._adapters is not None
        matrix = f"layers.{layer}.{name}"
        if adapted.apart:
            return self._adapters.beside(matrix, x, adapted.groups)
        return self._adapters.added(matrix, x, y, adapted.groups)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """In the buffer."""
        return rms_norm(x, weight, self._eps, out=self.buffer[: len(x)])

    def of_normed(
        self, x: Tensor, norm: Tensor, weight: Weight, bias: Tensor | None, out: Tensor, name: tuple[int, str],
        adapted: AdaptedRows | None, late: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """The product of x, to which `late` is added first, in `out`, and what adapters add to it, if kept apart.
        `name`: the matrix of which layer, as adapters call it."""
        if adapted is None and self.fuses(len(x), weight):
            linear(x, weight, out=out, norm_weight=norm, eps=self._eps, bias=bias)
            return None
        if late is None:
            normed = self.norm(x, norm)
        else:
            normed = rms_norm(late, norm, self._eps, residual=x, out=self.buffer[: len(x)])
        with self.around(*name, normed, out, adapted) as added:
            self.plain(normed, weight, bias, out)
        return added

    def activated(
        self, x: Tensor, norm: Tensor | None, weight: Weight, bias: Tensor | None, out: Tensor
    ) -> bool:
        """silu(gate) · up of x in `out`, normed first where a norm is given, if one kernel does it all."""
        if not self.fuses(len(x), weight, swiglu=True):
            return False
        linear(x, weight, out=out, norm_weight=norm, eps=self._eps, swiglu=True, bias=bias)
        return True

    def plain(self, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> Tensor:
        return linear(x, weight, out=out, bias=bias, invariant=self.invariant)

    def onto_stream(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        stream: Tensor,
        half: int,
    ) -> None:
        """stream += x · weightᵀ + bias, which is a rank's partial sum where the model is cut."""
        onto = stream if self.slice is None else None
        out = stream if self.slice is None else self.slice.partial(half, len(stream))
        linear(x, weight, out=out, residual=onto, bias=bias, invariant=self.invariant, parts=self._parts)
        if self.slice is not None:
            self.slice.add_partials(half, stream, rounded=self.invariant)

    def fuses(self, tokens: int, weight: Weight, swiglu: bool = False) -> bool:
        """Whether the product norms on the way; otherwise our own kernel does, into our own buffer."""
        return not self.invariant and fuses(tokens, weight, swiglu)
