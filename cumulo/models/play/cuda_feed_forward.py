"""CudaFeedForward: the second half of a layer in the GPU decoder, plain (SwiGLU), or a mixture of experts, of
which a rank may have some. `CudaDecoder` makes one; its buffers serve all layers.
"""

import torch
from torch import Tensor

from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm
from cumulo.kernels.cuda.elementwise.swiglu import swiglu
from cumulo.kernels.cuda.linear.linear import linear
from cumulo.kernels.cuda.moe.moe import MoEBuffers, mixture
from cumulo.models.play.cuda_products import AdaptedRows, StepProducts
from cumulo.models.play.cuda_rows import RankRows, StepSplit
from cumulo.models.play.cuda_slice import FEED_FORWARD, SHARED_EXPERT
from cumulo.models.play.cuda_weights import LayerWeights
from cumulo.spec.model import ModelSpec


class CudaFeedForward:
    def __init__(
        self,
        spec: ModelSpec,
        width: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        products: StepProducts,
        rows: RankRows | None,
    ) -> None:
        """`width`: of the widest plain feed-forward; `rows`: where ranks compute different sequences."""
        self._products, self._rows, self._eps = products, rows, spec.norm_eps
        self._gate_up = torch.empty((max_tokens, 2 * width), dtype=dtype, device=device)
        self._activated = torch.empty((max_tokens, width), dtype=dtype, device=device)
        self._moe = None
        if spec.moe is not None:
            self._moe = MoEBuffers(spec.moe, spec.hidden, max_tokens, dtype, device)

    @property
    def nbytes(self) -> int:
        moe = 0 if self._moe is None else self._moe.nbytes
        return self._gate_up.nbytes + self._activated.nbytes + moe

    def add(
        self, layer: LayerWeights, index: int, stream: Tensor, adapted: AdaptedRows | None,
        split: StepSplit | None, late: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """`late`: what adapters add to the stream before; returned: what they add behind, if kept apart."""
        if layer.mixture is not None:
            if split is not None and self._rows is not None and self._rows.spreads_experts:
                self._add_experts_of_all(layer, stream, split, self._rows)
            else:
                self._add_experts(layer, stream)
            return None
        activated = self._inner(stream, layer, layer.ffn_norm, index, adapted, late)
        assert layer.down is not None
        with self._products.around(index, "ffn.down", activated, stream, adapted) as behind:
            self._products.onto_stream(activated, layer.down, layer.down_bias, stream, FEED_FORWARD)
        return behind

    def _add_experts(self, layer: LayerWeights, stream: Tensor) -> None:
        assert self._moe is not None and layer.mixture is not None
        experts, router, products = layer.mixture.experts, layer.mixture.router, self._products
        normed = products.norm(stream, layer.ffn_norm)
        rank_slice = products.slice
        target = stream if rank_slice is None else rank_slice.partial(FEED_FORWARD, len(stream)).zero_()
        mixture(
            normed, router.weight, experts.gate_up, experts.down, self._moe, target, router.selection_bias,
            products.invariant, first_expert=0 if rank_slice is None else rank_slice.first_expert,
            sum_parts=products.sum_parts,
        )  # fmt: skip
        # Of the expert that every token passes through.
        shared = None if layer.gate_up is None else self._inner(normed, layer, None)
        if shared is not None and not products.invariant:
            assert layer.down is not None
            linear(shared, layer.down, out=target, residual=target, bias=layer.down_bias)
        if rank_slice is not None:
            rank_slice.add_partials(FEED_FORWARD, stream)
        if shared is not None and products.invariant:  # behind the others, on any number of ranks
            assert layer.down is not None
            products.onto_stream(shared, layer.down, layer.down_bias, stream, SHARED_EXPERT)

    def _add_experts_of_all(
        self, layer: LayerWeights, stream: Tensor, split: StepSplit, rows: RankRows
    ) -> None:
        """A mixture whose experts are spread over ranks that have different rows."""
        assert self._moe is not None and layer.mixture is not None
        experts, router, products = layer.mixture.experts, layer.mixture.router, self._products
        normed = rms_norm(stream, layer.ffn_norm, self._eps, out=rows.own_rows(len(stream)))
        target = rows.partial(split)
        mixture(
            rows.all_rows(split), router.weight, experts.gate_up, experts.down, self._moe, target,
            router.selection_bias, products.invariant, first_expert=rows.first_expert,
            sum_parts=products.sum_parts,
        )  # fmt: skip
        shared = None if layer.gate_up is None else self._inner(normed, layer, None)
        rows.add_partials(split, stream)
        if shared is not None:  # the expert of all tokens: behind the others, as on one rank
            assert layer.down is not None
            products.onto_stream(shared, layer.down, layer.down_bias, stream, FEED_FORWARD)

    def _inner(
        self, x: Tensor, layer: LayerWeights, norm: Tensor | None, index: int = 0,
        adapted: AdaptedRows | None = None, late: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """silu(gate) · up of x, normed first where a norm is given."""
        tokens, width, weight, bias = len(x), layer.ffn_width, layer.gate_up, layer.gate_up_bias
        assert weight is not None
        activated = self._activated.view(-1)[: tokens * width].view(tokens, width)
        if adapted is None and self._products.activated(x, norm, weight, bias, activated):
            return activated
        both = self._gate_up.view(-1)[: tokens * 2 * width].view(tokens, 2 * width)
        added = None
        if norm is None:
            self._products.plain(x, weight, bias, both)
        else:
            name = (index, "ffn.gate_up")
            added = self._products.of_normed(x, norm, weight, bias, both, name, adapted, late)
        return swiglu(both, activated, added)
