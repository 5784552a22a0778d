"""CudaDecoder: a step of a decoder in GPU kernels, into buffers that never move, so that it can be captured in
a CUDA graph. `CudaRunner` plays it in place of the torch `Decoder` it was made from, whose weights it shares.

A half-layer is: norm, product, (rotation and pages, attention | SwiGLU), product onto the residual stream. A few
tokens take the products that stream weights and norm on the way; many take the matrix units.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.kernels.cuda import registry
from cumulo.kernels.cuda.fp8 import Fp8Weight
from cumulo.kernels.cuda.linear import Weight, choose, linear, prepare
from cumulo.kernels.cuda.moe import MoEBuffers, mixture
from cumulo.kernels.cuda.paged_attention import AttentionPlan
from cumulo.kernels.cuda.rms_norm import rms_norm
from cumulo.kernels.cuda.rope_cache import rope_cache
from cumulo.kernels.cuda.swiglu import swiglu
from cumulo.models.attention import Attention
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.linear import Linear
from cumulo.models.moe import FeedForward, MixtureOfExperts
from cumulo.spec.gpu_kernels import obstacle_of


@dataclass(slots=True)
class StepTensors:
    """One step on the device, all int32; views of buffers that stay where they are."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]: where each token's K and V are written; -1: nowhere
    logit_rows: Tensor  # [R]: tokens whose logits are wanted
    attention: AttentionPlan  # prepared for this step


def why_not(decoder: Decoder) -> str | None:
    """What keeps a decoder from being played by these kernels, or None."""
    obstacle = obstacle_of(decoder.spec, str(decoder.dtype).removeprefix("torch."))
    if obstacle is not None:
        return obstacle
    for name, module in decoder.named_modules():
        if isinstance(module, Linear) and module.packed is not None:
            return f"{name} is packed for a CPU"
    return None


class CudaDecoder:
    def __init__(
        self,
        decoder: Decoder,
        max_tokens: int,
        max_outputs: int,
        *,
        fp8_weights: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        """Buffers for steps of up to `max_tokens` tokens and `max_outputs` rows of logits.

        `fp8_weights` quantises the layers' matrices to e4m3, one scale an output row, and frees the plain ones.
        `batch_invariant` uses only kernels whose rows do not depend on the rows beside them.
        """
        obstacle = why_not(decoder)
        if obstacle is not None:
            raise ValueError(f"this decoder cannot be played by the GPU kernels: {obstacle}")
        self.decoder, self.spec, self.dtype = decoder, decoder.spec, decoder.dtype
        spec, device = decoder.spec, decoder.embed.weight.device
        self.device = device
        registry.load_for(registry.device_name(device))
        prepare(device)
        self.max_tokens, self.max_outputs = max_tokens, max_outputs
        self.invariant, self._fp8 = batch_invariant, fp8_weights
        decoder.rotary.at(torch.zeros(0, dtype=torch.int64, device=device))  # makes the table
        assert decoder.rotary.table is not None
        self.cosine, self.sine = (table.contiguous() for table in decoder.rotary.table)
        self.layers = [self._layer_weights(layer) for layer in decoder.layers]
        self.head: Weight = (decoder.embed if spec.tied_embeddings else decoder.head).weight
        self.moe_buffers = None
        if spec.moe is not None:
            self.moe_buffers = MoEBuffers(spec.moe, spec.hidden, max_tokens, self.dtype, device)

        def buffer(rows: int, columns: int) -> Tensor:
            return torch.empty((rows, columns), dtype=self.dtype, device=device)

        heads = spec.heads * spec.head_dim
        self.stream = buffer(max_tokens, spec.hidden)
        self.normed = buffer(max_tokens, spec.hidden)
        self.qkv = buffer(max_tokens, heads + 2 * spec.kv_heads * spec.head_dim)
        self.mixed = buffer(max_tokens, heads)
        widest = max((layer.ffn_width for layer in self.layers), default=0)
        self.gate_up = buffer(max_tokens, 2 * widest)
        self.activated = buffer(max_tokens, widest)
        self.last_stream, self.last_mixed = buffer(max_outputs, spec.hidden), buffer(max_outputs, heads)
        self.wanted = buffer(max_outputs, spec.hidden)
        self.logits = buffer(max_outputs, spec.vocab_size)

    @property
    def buffer_bytes(self) -> int:
        """What a step works in; the ledger's activations and logits together."""
        own = (
            self.stream,
            self.normed,
            self.qkv,
            self.mixed,
            self.gate_up,
            self.activated,
            self.last_stream,
            self.last_mixed,
            self.wanted,
            self.logits,
        )
        return sum(tensor.nbytes for tensor in own) + (self.moe_buffers.nbytes if self.moe_buffers else 0)

    # -- a step --------------------------------------------------------------------------------------------
    def forward(self, step: StepTensors, cache: KVCache, every_row: bool = False) -> Tensor:
        """Compute a step, write its keys and values; the logits [R, vocabulary] of `step.logit_rows`.

        After the last layer's attention only the rows whose logits are wanted go on, usually a few of thousands;
        with `every_row` all do, and `stream` holds them afterwards.
        """
        tokens, outputs = len(step.token_ids), len(step.logit_rows)
        stream = self.stream[:tokens]
        torch.index_select(self.decoder.embed.weight, 0, step.token_ids, out=stream)
        pick = outputs < tokens and not every_row
        for index, layer in enumerate(self.layers):
            mixed = self._attend(layer, stream, step, cache, index)
            if pick and index == len(self.layers) - 1:
                stream = torch.index_select(stream, 0, step.logit_rows, out=self.last_stream[:outputs])
                mixed = torch.index_select(mixed, 0, step.logit_rows, out=self.last_mixed[:outputs])
                if outputs == 0:  # the middle of a prompt
                    break
            linear(
                mixed,
                layer.output,
                out=stream,
                residual=stream,
                bias=layer.output_bias,
                invariant=self.invariant,
            )
            self._feed_forward(layer, stream)
        if outputs == 0:
            return self.logits[:0]
        rows = None if pick else step.logit_rows
        norm = self.decoder.final_norm.weight
        wanted = rms_norm(stream, norm, self.spec.norm_eps, rows=rows, out=self.wanted[:outputs])
        return self.logits_of(wanted, self.logits[:outputs])

    def logits_of(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Normed hidden states [R, hidden] -> [R, vocabulary]."""
        return linear(hidden, self.head, out=out, invariant=self.invariant)

    def _attend(
        self, layer: "LayerWeights", stream: Tensor, step: StepTensors, cache: KVCache, index: int
    ) -> Tensor:
        """Attention's result [T, heads · head_dim], before the output product; keys and values are written."""
        spec, tokens = self.spec, len(stream)
        qkv = self._normed_product(stream, layer.attention_norm, layer.qkv, self.qkv[:tokens], layer.qkv_bias)
        keys, values = cache.keys[index], cache.values[index]
        rope_cache(
            qkv, self.cosine, self.sine, step.positions, step.slots, keys, values, spec.heads,
            layer.q_norm, layer.k_norm, spec.norm_eps, spec.rope_interleaved,
        )  # fmt: skip
        query = qkv.view(tokens, -1, spec.head_dim)[:, : spec.heads]
        mixed = self.mixed[:tokens]
        step.attention.attend(
            query,
            keys,
            values,
            mixed.view(tokens, spec.heads, spec.head_dim),
            layer.scale,
            window=layer.window,
        )
        return mixed

    def _feed_forward(self, layer: "LayerWeights", stream: Tensor) -> None:
        tokens = len(stream)
        if layer.mixture is not None:
            assert self.moe_buffers is not None
            experts, router = layer.mixture.experts, layer.mixture.router
            normed = rms_norm(stream, layer.ffn_norm, self.spec.norm_eps, out=self.normed[:tokens])
            mixture(
                normed, router.weight, experts.gate_up, experts.down, self.moe_buffers, stream,
                router.selection_bias, self.invariant,
            )  # fmt: skip
            if layer.gate_up is None:
                return
            activated = self._activated(normed, layer, None)  # the expert that every token passes through
        else:
            activated = self._activated(stream, layer, layer.ffn_norm)
        assert layer.down is not None
        linear(
            activated, layer.down, out=stream, residual=stream, bias=layer.down_bias, invariant=self.invariant
        )

    def _activated(self, x: Tensor, layer: "LayerWeights", norm: Tensor | None) -> Tensor:
        """silu(gate) · up of x, normed first where a norm is given."""
        tokens, width = len(x), layer.ffn_width
        assert layer.gate_up is not None
        activated = self.activated.view(-1)[: tokens * width].view(tokens, width)
        if self._fuses(tokens, layer.gate_up, swiglu=True):
            return linear(
                x, layer.gate_up, out=activated, norm_weight=norm, eps=self.spec.norm_eps, swiglu=True,
                bias=layer.gate_up_bias,
            )  # fmt: skip
        both = self.gate_up.view(-1)[: tokens * 2 * width].view(tokens, 2 * width)
        if norm is None:
            linear(x, layer.gate_up, out=both, bias=layer.gate_up_bias, invariant=self.invariant)
        else:
            self._normed_product(x, norm, layer.gate_up, both, layer.gate_up_bias)
        return swiglu(both, activated)

    def _normed_product(
        self, x: Tensor, norm: Tensor, weight: Weight, out: Tensor, bias: Tensor | None
    ) -> Tensor:
        eps = self.spec.norm_eps
        if self._fuses(len(x), weight):
            return linear(x, weight, out=out, norm_weight=norm, eps=eps, bias=bias)
        normed = rms_norm(x, norm, eps, out=self.normed[: len(x)])
        return linear(normed, weight, out=out, bias=bias, invariant=self.invariant)

    def _fuses(self, tokens: int, weight: Weight, swiglu: bool = False) -> bool:
        """Whether the product norms on the way; otherwise our own kernel does, into our own buffer."""
        if self.invariant:
            return False
        return isinstance(weight, Fp8Weight) or choose(tokens, weight, swiglu).kernel != "library"

    # -- weights -------------------------------------------------------------------------------------------
    def _layer_weights(self, layer: torch.nn.Module) -> "LayerWeights":
        assert isinstance(layer, Layer) and isinstance(layer.attention, Attention)
        attention, ffn = layer.attention, layer.ffn
        normed = self.spec.qk_norm
        if self._fp8:
            for linear_layer in layer.modules():
                if isinstance(linear_layer, Linear) and linear_layer.packed is None:
                    linear_layer.pack(_Packed(Fp8Weight.quantised(linear_layer.weight)))
        plain = ffn if isinstance(ffn, FeedForward) else ffn.shared
        return LayerWeights(
            attention_norm=layer.attention_norm.weight,
            qkv=_matrix(attention.qkv),
            qkv_bias=attention.qkv.bias,
            q_norm=attention.q_norm.weight if normed else None,
            k_norm=attention.k_norm.weight if normed else None,
            output=_matrix(attention.output),
            output_bias=attention.output.bias,
            scale=attention.scale,
            window=attention.window,
            ffn_norm=layer.ffn_norm.weight,
            mixture=ffn if isinstance(ffn, MixtureOfExperts) else None,
            gate_up=None if plain is None else _matrix(plain.gate_up),
            gate_up_bias=None if plain is None else plain.gate_up.bias,
            down=None if plain is None else _matrix(plain.down),
            down_bias=None if plain is None else plain.down.bias,
            ffn_width=0 if plain is None else plain.down.shape[1],
        )


class _Packed:
    """A GPU's quantised matrix in the place of a plain one in the torch decoder, which can still be asked for
    both."""

    def __init__(self, weight: Fp8Weight) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def rows(self, indices: Tensor) -> Tensor:
        return self.weight.dequantised()[indices]


def _matrix(layer: Linear) -> Weight:
    return layer.packed.weight if isinstance(layer.packed, _Packed) else layer.weight


@dataclass(slots=True)
class LayerWeights:
    """What a layer's products and norms read; a matrix may be plain or quantised for the GPU."""

    attention_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Weight
    output_bias: Tensor | None
    scale: float
    window: int | None
    ffn_norm: Tensor
    mixture: MixtureOfExperts | None
    gate_up: Weight | None  # of the plain feed-forward, or of the expert every token passes through
    gate_up_bias: Tensor | None
    down: Weight | None
    down_bias: Tensor | None
    ffn_width: int
