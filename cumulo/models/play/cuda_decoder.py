"""CudaDecoder: a step of a decoder in GPU kernels, into buffers that never move, so that it can be captured in
a CUDA graph. `CudaRunner` plays it in place of the torch `Decoder` it was made from, whose weights it shares.

A half-layer is: norm, product, (rotation and pages, attention | SwiGLU), product onto the residual stream. This
file has the walk through the layers and attention, `cuda_products` the products, `cuda_feed_forward` the second
half.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.kernels.cuda import registry
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm
from cumulo.kernels.cuda.elementwise.rope_cache import rope_cache
from cumulo.kernels.cuda.linear.linear import linear, prepare, rotates
from cumulo.kernels.cuda.linear.product import PagedRotation, Weight
from cumulo.kernels.cuda.linear.w4_weight import W4Weight, reserve_scratch
from cumulo.layout.equal_sums import USUAL_PARTS
from cumulo.models.adapters.bank import AdapterBank
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder
from cumulo.models.linear import Linear
from cumulo.models.play.cuda_adapters import CudaAdapters, StepAdapters
from cumulo.models.play.cuda_feed_forward import CudaFeedForward
from cumulo.models.play.cuda_latent import LatentHalf
from cumulo.models.play.cuda_products import AdaptedRows, StepProducts
from cumulo.models.play.cuda_rows import RankRows, StepSplit
from cumulo.models.play.cuda_slice import ATTENTION, RankSlice
from cumulo.models.play.cuda_stage import FarStage, RankStage
from cumulo.models.play.cuda_weights import HeadWeights, LayerWeights, layer_weights
from cumulo.spec.gpu_kernels import obstacle_of


@dataclass(slots=True)
class StepTensors:
    """One step on the device, all int32; views of buffers that stay where they are."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]: where each token's K and V are written; -1: nowhere
    logit_rows: Tensor  # [R]: tokens whose logits are wanted
    attention: AttentionPlan  # prepared for this step
    adapters: StepAdapters | None = None  # rows that have one
    split: StepSplit | None = None  # of data-parallel attention: which rows are here
    entered: bool = False  # the tokens' embeddings are in the stream already
    wants_logits: bool = True  # otherwise all rows go through all layers, and stay in the stream


def why_not(decoder: Decoder) -> str | None:
    """What keeps a decoder from being played by these kernels, or None."""
    obstacle = obstacle_of(decoder.spec, str(decoder.dtype).removeprefix("torch."))
    if obstacle is not None:
        return obstacle
    for name, module in decoder.named_modules():
        if isinstance(module, Linear) and module.packed is not None:
            return f"{name} is packed for a CPU"
    return None


def _kind(layer: LayerWeights) -> tuple[object, ...]:
    """Layers of one kind launch the same kernels."""
    plain = None if layer.gate_up is None else tuple(layer.gate_up.shape)
    return type(layer.attention), layer.window, layer.mixture is None, plain


class CudaDecoder:
    def __init__(
        self,
        decoder: Decoder,
        max_tokens: int,
        max_outputs: int,
        *,
        weights: str = "auto",
        batch_invariant: bool = False,
        rank_slice: RankSlice | None = None,
        stage: RankStage | FarStage | None = None,
        rows: RankRows | None = None,
        bank: AdapterBank | None = None,
        sum_parts: int = USUAL_PARTS,
        largest: Callable[[Tensor], Tensor] = lambda own: own,
    ) -> None:
        """Buffers for steps of up to `max_tokens` tokens and `max_outputs` rows of logits.

        `weights` fp8 quantises the layers' matrices to e4m3, one scale an output row, int4 to 4 bits, one scale for
        128 weights; the plain ones are freed. A mixture's routed experts, its router and latent attention's kv_b
        stay as they are.
        `batch_invariant` uses only kernels whose rows do not depend on the rows beside them.
        `rank_slice`: the decoder is one rank's part of a model; its spec has that rank's heads and widths, and
        its share of the vocabulary.
        `stage`: it has some of the model's layers only, and gets its stream from the stage before.
        `rows`: it computes some of the sequences only, and its experts for all.
        `bank`: the adapters that rows may have.
        `sum_parts`: in how many parts sums that ranks may share are added up, where it is invariant.
        `largest`: of each number the largest that a slice has, for the scales of matrices that slices share.
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
        self.invariant, self.slice, self.stage, self.rows = batch_invariant, rank_slice, stage, rows
        self.draws = stage is None or stage.last  # others have no logits
        decoder.rotary.rotation_at(torch.zeros(0, dtype=torch.int64, device=device))  # makes the table
        assert decoder.rotary.table is not None
        self.cosine, self.sine = (table.contiguous() for table in decoder.rotary.table)
        adds_biases = rank_slice is None or rank_slice.rank == 0
        self.layers = [layer_weights(layer, weights, adds_biases, largest) for layer in decoder.layers]
        if weights != "auto" and device.type == "cuda":
            torch.cuda.empty_cache()  # what the plain matrices took: the KV cache is one large piece
        matrices = (one for layer in self.layers for one in (layer.gate_up, layer.down, layer.output))
        self.scratch_bytes = reserve_scratch(
            (one for one in matrices if isinstance(one, W4Weight)), self.dtype
        )
        self._played = list(enumerate(self.layers))
        # Called when a layer's keys and values are launched.
        self.on_layer: Callable[[int], None] | None = None
        self.windows = tuple(dict.fromkeys(layer.window for layer in self.layers))
        self.head: Weight = (decoder.embed if spec.tied_embeddings else decoder.head).weight
        # The stream as it enters these layers is kept for a draft head, side by side (`tap`).
        self.tap_layers: tuple[int, ...] = ()
        self.tapped: Tensor | None = None
        self.adapters = None if bank is None else CudaAdapters(bank, max_tokens, max_outputs)
        self.products = StepProducts(
            spec,
            max_tokens,
            self.dtype,
            device,
            invariant=batch_invariant,
            rank_slice=rank_slice,
            adapters=self.adapters,
            sum_parts=sum_parts,
        )
        widest = max((layer.ffn_width for layer in self.layers), default=0)
        self.feed_forward = CudaFeedForward(spec, widest, max_tokens, self.dtype, device, self.products, rows)

        def buffer(rows: int, columns: int) -> Tensor:
            return torch.empty((rows, columns), dtype=self.dtype, device=device)

        self.stream = buffer(max_tokens, spec.hidden)
        self.latent = None
        if spec.mla is None:
            heads = spec.heads * spec.head_dim
            self.qkv = buffer(max_tokens, heads + 2 * spec.kv_heads * spec.head_dim)
        else:
            heads = spec.heads * spec.mla.value_head_dim
            self.qkv = buffer(max_tokens, 0)
            self.latent = LatentHalf(spec, spec.mla, max_tokens, self.dtype, device, batch_invariant)
        self.mixed = buffer(max_tokens, heads)
        self.last_stream, self.last_mixed = buffer(max_outputs, spec.hidden), buffer(max_outputs, heads)
        self.wanted = buffer(max_outputs, spec.hidden)
        # Of this rank's share of the vocabulary.
        if rank_slice is None:
            self.logits = buffer(max_outputs if self.draws else 0, spec.vocab_size)
        else:
            self.logits = rank_slice.logits

    @property
    def vocab_size(self) -> int:
        """The vocabulary of the whole model."""
        return self.spec.vocab_size * (1 if self.slice is None else self.slice.ranks)

    @property
    def weight_bytes(self) -> int:
        return self.decoder.weight_bytes

    @property
    def buffer_bytes(self) -> int:
        """What a step works in; the ledger's activations and logits together."""
        own = (self.stream, self.products.buffer, self.qkv, self.mixed, self.last_stream, self.last_mixed,
               self.wanted, self.logits)  # fmt: skip
        parts = (self.feed_forward, self.latent, self.adapters)
        held = sum(tensor.nbytes for tensor in own) + sum(part.nbytes for part in parts if part is not None)
        return held + self.scratch_bytes

    def attention_plan(
        self,
        tokens: int,
        sequences: int,
        decode_only: bool,
        cache: KVCache,
        max_blocks: int,
        share_scratch_with: AttentionPlan | None,
    ) -> AttentionPlan:
        """For steps of so many tokens and sequences of up to `max_blocks` blocks each."""
        spec = self.spec
        return AttentionPlan(
            tokens, sequences, spec.heads, spec.kv_cache_heads, spec.kv_key_dim, cache.block_size, max_blocks,
            decode_only, self.invariant, self.device, rank=0 if spec.mla is None else spec.mla.kv_rank,
            windows=self.windows, kv_dtype=cache.key_storage.dtype, share_scratch_with=share_scratch_with,
        )  # fmt: skip

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Steps inside compute nonsense, but launch every kernel that a whole step launches."""
        kinds = {_kind(layer): (index, layer) for index, layer in reversed(self._played)}
        whole, self._played = self._played, sorted(kinds.values(), key=lambda pair: pair[0])
        try:
            yield
        finally:
            self._played = whole

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Kernels that are launched inside do not wait for other ranks, and compute nonsense."""
        memories = [part.memory for part in (self.slice, self.stage, self.rows) if part is not None]
        for memory in memories:
            memory.waits = False
        try:
            yield
        finally:
            for memory in memories:
                memory.waits = True

    # -- a step --------------------------------------------------------------------------------------------
    def forward(self, step: StepTensors, cache: KVCache, every_row: bool = False) -> Tensor:
        """Compute a step, write its keys and values; the logits [R, vocabulary] of `step.logit_rows`.

        After the last layer's attention only the rows whose logits are wanted go on, usually a few of thousands;
        with `every_row` all do, and `stream` holds them afterwards. A stage that is not the last passes all on.
        """
        tokens, outputs = len(step.token_ids), len(step.logit_rows)
        stream = self.stream[:tokens]
        if not step.entered:
            self._enter(step.token_ids, stream)
        pick = outputs < tokens and not every_row and self.draws and step.split is None
        adapted = self.products.adapted(None if step.adapters is None else step.adapters.tokens, tokens)
        late: Tensor | None = None  # what adapters add to the stream: the next norm takes it up
        last = self._played[-1][0]
        for index, layer in self._played:
            if index in self.tap_layers:
                self._taken_up(late, stream)
                late = None
                self._keep(index, stream)
            mixed = self._attend(layer, stream, step, cache, index, adapted, late)
            if self.on_layer is not None:
                self.on_layer(index)
            late = None
            if pick and index == last:
                stream = torch.index_select(stream, 0, step.logit_rows, out=self.last_stream[:outputs])
                mixed = torch.index_select(mixed, 0, step.logit_rows, out=self.last_mixed[:outputs])
                if outputs == 0:  # the middle of a prompt
                    break
                if adapted is not None and step.adapters is not None:
                    adapted = self.products.adapted(step.adapters.outputs, outputs, adapted.apart)
            with self.products.around(index, "attention.output", mixed, stream, adapted) as late:
                self.products.onto_stream(mixed, layer.output, layer.output_bias, stream, ATTENTION)
            late = self.feed_forward.add(layer, index, stream, adapted, step.split, late)
        self._taken_up(late, stream)
        if self.stage is not None and not self.draws:
            self.stage.send(stream)
            if self.slice is not None:
                self.slice.end_step()
        if outputs == 0 or not self.draws or not step.wants_logits:
            return self.logits[:0]
        rows = None if pick else step.logit_rows
        norm = self.decoder.final_norm.weight
        wanted = self.wanted[:outputs]
        if self.rows is not None and step.split is not None:
            # Rows of others are nonsense until they are gathered.
            rms_norm(stream, norm, self.spec.norm_eps, rows=rows, out=self.rows.own_wanted(outputs))
            self.rows.all_wanted(step.split, wanted)
        else:
            rms_norm(stream, norm, self.spec.norm_eps, rows=rows, out=wanted)
        return self.logits_of(wanted, self.logits[:outputs])

    @property
    def enters_plainly(self) -> bool:
        """Whether the stream begins as rows of this rank's embedding."""
        return self.slice is None and (self.stage is None or self.stage.first)

    def _enter(self, token_ids: Tensor, stream: Tensor) -> None:
        """The stream before the first layer that is here."""
        if self.stage is not None and not self.stage.first:
            self.stage.receive(stream)
        elif self.slice is None:
            torch.index_select(self.decoder.embed.weight, 0, token_ids, out=stream)
        else:
            self.slice.embed(token_ids, self.decoder.embed.weight, stream)

    def tap(self, layers: tuple[int, ...]) -> None:
        """From now on every step keeps its stream where it enters these layers, in `tapped`."""
        self.tap_layers = layers
        columns = len(layers) * self.spec.hidden
        self.tapped = torch.zeros((self.max_tokens, columns), dtype=self.dtype, device=self.device)

    def _keep(self, layer: int, stream: Tensor) -> None:
        assert self.tapped is not None
        hidden = self.spec.hidden
        for place, tapped in enumerate(self.tap_layers):  # a model of few layers has one in several places
            if tapped == layer:
                self.tapped[: len(stream), place * hidden : (place + 1) * hidden].copy_(stream)

    def logits_of(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Normed hidden states [R, hidden] -> [R, vocabulary], this rank's share of it."""
        return linear(hidden, self.head, out=out, invariant=self.invariant)

    def whole_logits(self, rows: int) -> Tensor:
        """The last logits, with the columns of all ranks."""
        return self.logits[:rows] if self.slice is None else self.slice.gather(rows)

    def _attend(
        self, layer: LayerWeights, stream: Tensor, step: StepTensors, cache: KVCache, index: int,
        adapted: AdaptedRows | None, late: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attention's result [T, heads · head_dim], before the output product; keys and values are written."""
        spec, tokens, heads = self.spec, len(stream), layer.attention
        keys, values = cache.keys[index], cache.values[index]
        mixed = self.mixed[:tokens]
        if not isinstance(heads, HeadWeights):
            assert self.latent is not None
            normed = self.products.norm(stream, layer.attention_norm)
            return self.latent.attend(
                heads, normed, keys, (self.cosine, self.sine), step.positions, step.slots, step.attention,
                layer.scale, layer.window, mixed,
            )  # fmt: skip
        qkv = self.qkv[:tokens]
        name = (index, "attention.qkv")
        if adapted is None and late is None and self._rotates_at_once(tokens, heads, keys):
            rotation = PagedRotation(
                self.cosine, self.sine, step.positions, step.slots, keys, values, spec.heads
            )
            linear(
                stream, heads.qkv, qkv, norm_weight=layer.attention_norm, eps=spec.norm_eps, bias=heads.qkv_bias,
                rotation=rotation,
            )  # fmt: skip
        else:
            added = self.products.of_normed(
                stream, layer.attention_norm, heads.qkv, heads.qkv_bias, qkv, name, adapted, late
            )
            rope_cache(
                qkv, self.cosine, self.sine, step.positions, step.slots, keys, values, spec.heads,
                heads.q_norm, heads.k_norm, spec.norm_eps, spec.rope_interleaved, invariant=self.invariant,
                added=added,
            )  # fmt: skip
        query = qkv.view(tokens, -1, spec.head_dim)[:, : spec.heads]
        result = mixed.view(tokens, spec.heads, spec.head_dim)
        step.attention.attend(query, keys, values, result, layer.scale, window=layer.window)
        return mixed

    def _rotates_at_once(self, tokens: int, heads: HeadWeights, keys: Tensor) -> bool:
        """Whether one kernel makes queries, keys and values, rotates them and writes their pages."""
        plain = heads.q_norm is None and not self.spec.rope_interleaved and keys.dtype == self.dtype
        fits = plain and self.spec.head_dim % 32 == 0 and not self.invariant
        return fits and rotates(tokens, heads.qkv, self.dtype)

    @staticmethod
    def _taken_up(late: Tensor | None, stream: Tensor) -> None:
        if late is not None:
            stream.add_(late)
