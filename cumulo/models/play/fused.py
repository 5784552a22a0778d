"""FusedDecoder: a whole step of a dense decoder in one call of the native kernels. A runner uses it in place
of the torch `Decoder` it was made from, wherever `why_not` has nothing to say.

The layers become a flat list of operations (native/program.h) once; a step then only says how many tokens
there are and where its tables lie, and one team of threads plays the list: no Python, no allocation and no
thread start between layers. Same interface as `Decoder`: `forward` gives hidden states, `logits` makes
logits of them.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulo.kernels.cpu import library as native_library
from cumulo.kernels.cpu.library import GroupsStruct, NativeLibrary, OpStruct, StepStruct
from cumulo.kernels.cpu.packed_float8 import PackedFloat8, float_linear
from cumulo.kernels.cpu.packed_linear import PackedWeight
from cumulo.kernels.cpu.paged_attention import KV_FORMATS, attention_fields
from cumulo.kernels.low_rank import AdapterGroups
from cumulo.models.attention import Attention
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.heads.eagle import StreamTap
from cumulo.models.linear import Linear
from cumulo.models.moe import FeedForward
from cumulo.models.play.op_writer import Activation, ActivationRoom, OpWriter
from cumulo.models.play.rank_decoder import embed_slice
from cumulo.models.play.rank_links import RankLinks


@dataclass(slots=True)
class _Segment:
    """Operations that follow each other without a word to anybody."""

    ops: Any  # a ctypes array of OpStruct
    partial: Activation | None = None  # what they leave is summed over ranks
    over_outputs: bool = False
    layer: int | None = None  # which is computed when they have ended


class StepBuffers:
    """What a step of up to `rows` tokens works in."""

    def __init__(self, decoder: Decoder, library: NativeLibrary, rows: int) -> None:
        room = self.room = ActivationRoom(library, rows)
        spec = decoder.spec
        heads = spec.heads * spec.head_dim
        self.hidden = room.buffer(spec.hidden)
        self.normed = room.buffer(spec.hidden)
        self.qkv = room.buffer(heads + 2 * spec.kv_heads * spec.head_dim)
        self.mixed = room.buffer(heads)
        self.gate_up = room.buffer(2 * spec.ffn_hidden)
        self.activated = room.buffer(spec.ffn_hidden)
        # What is wanted of the last layer is usually a few rows; from its attention on only they are computed.
        self.wanted_hidden = room.buffer(spec.hidden)
        self.wanted_mixed = room.buffer(heads)


class OpList:
    """The operations of one step in some buffers over one cache, whole and in parts."""

    def __init__(
        self,
        decoder: Decoder,
        tables: tuple[Tensor, Tensor],
        links: RankLinks | None,
        cache: KVCache,
        buffers: StepBuffers,
        tap: StreamTap | None,
        adapted: bool,
    ) -> None:
        """`tables`: cosine and sine of every position. `adapted`: rows may have adapters."""
        self._decoder, self._tables, self._cache, self.buffers = decoder, tables, cache, buffers
        spec = self.spec = decoder.spec
        self._writer = writer = OpWriter(buffers.room, spec.norm_eps, adapted)
        # After so many operations a segment ends, which has these fields.
        self._stops: list[tuple[int, dict[str, Any]]] = []
        self._last_stage = links is None or links.part.last
        self._summed = links is not None and links.tensor is not None
        # Of the ranks that sum up, one adds the stream so far.
        self._accumulate = links is None or links.part.carries_stream
        if links is None:
            writer.embed(decoder.embed, buffers.hidden)
        for layer in range(spec.layers):
            if tap is not None:
                for kept in tap.places(layer):
                    writer.keep(buffers.hidden, kept)
            self._layer(layer)
            if links is None:
                self._stops.append((len(writer.list), {"layer": layer}))
        if self._last_stage:
            norm = decoder.final_norm.weight
            writer.norm(buffers.wanted_hidden, norm, buffers.normed, None, over_outputs=True)
        self.ops = writer.array()
        # The same operations between what ranks sum up, and layer by layer for a cache that wants to be told.
        self._stops.append((len(writer.list), {}))
        begins = [0, *(end for end, _ in self._stops)]
        self.segments = [
            _Segment(self._part(begin, end), **fields)
            for begin, (end, fields) in zip(begins, self._stops, strict=False)
        ]

    def _part(self, first: int, end: int) -> Any:
        return (OpStruct * (end - first)).from_buffer(self.ops, first * ctypes.sizeof(OpStruct))

    def _sum(self, partial: Activation, over_outputs: bool) -> None:
        """What other ranks have of the same rows is added before anything goes on."""
        if self._summed:
            self._stops.append((len(self._writer.list), {"partial": partial, "over_outputs": over_outputs}))

    def set_result(self, hidden: Tensor) -> None:
        self.ops[len(self.ops) - 1].out = hidden.data_ptr()

    def _layer(self, index: int) -> None:
        spec, layer, buffers = self.spec, self._decoder.layers[index], self.buffers
        writer, carries = self._writer, self._accumulate
        assert isinstance(layer, Layer)
        attention, ffn = layer.attention, layer.ffn
        assert isinstance(attention, Attention) and isinstance(ffn, FeedForward)  # why_not has checked
        cache = attention_fields(
            self._cache.keys[index], self._cache.values[index], spec.heads, attention.scale, attention.window
        )
        writer.norm(buffers.hidden, layer.attention_norm.weight, buffers.normed, attention.qkv)
        writer.linear(buffers.normed, attention.qkv, buffers.qkv)
        writer.rotate(
            buffers.qkv,
            self._tables,
            cache,
            query_norm=attention.q_norm.weight.data_ptr() if spec.qk_norm else None,
            key_norm=attention.k_norm.weight.data_ptr() if spec.qk_norm else None,
            interleaved=int(spec.rope_interleaved),
        )
        writer.attend(buffers.qkv, buffers.mixed, cache)
        last = self._last_stage and index == spec.layers - 1
        hidden, mixed = buffers.hidden, buffers.mixed
        if last:
            hidden, mixed = buffers.wanted_hidden, buffers.wanted_mixed
            writer.gather(buffers.hidden, hidden)
            writer.gather(buffers.mixed, mixed)
        writer.quantize(mixed, attention.output, last)
        writer.linear(mixed, attention.output, hidden, accumulate=carries, over_outputs=last)
        self._sum(hidden, last)
        writer.norm(hidden, layer.ffn_norm.weight, buffers.normed, ffn.gate_up, last)
        writer.linear(buffers.normed, ffn.gate_up, buffers.gate_up, over_outputs=last)
        writer.silu_mul(buffers.gate_up, buffers.activated, ffn.down, last)
        writer.linear(buffers.activated, ffn.down, hidden, accumulate=carries, over_outputs=last)
        self._sum(hidden, last)


def native_step(
    batch: ForwardBatch, cache: KVCache, outputs: int, vocabulary: int, position_limit: int
) -> StepStruct:
    """The step holds addresses, so that the batch must live until it is played; `position_limit`: the rows of the
    rotary tables."""
    block_tables = batch.block_tables.contiguous()
    step = StepStruct(
        tokens=len(batch.token_ids),
        sequences=len(batch.context_lengths),
        outputs=outputs,
        table_stride=block_tables.shape[1],
        vocabulary=vocabulary,
        position_limit=position_limit,
        blocks=cache.blocks,
        block_size=cache.block_size,
        token_ids=pointer(batch.token_ids, torch.int64),
        positions=pointer(batch.positions, torch.int64),
        slots=pointer(batch.slots, torch.int64),
        output_rows=pointer(batch.logit_rows, torch.int64),
        query_starts=pointer(batch.query_starts, torch.int32),
        context_lengths=pointer(batch.context_lengths, torch.int32),
        block_tables=pointer(block_tables, torch.int32),
    )
    step.kept = block_tables  # may be a copy that nobody else holds
    return step


def pointer(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of a tensor, checked to be what the kernels expect."""
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous {dtype} tensor, got {tensor.dtype} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


ROWS_STEP = 64  # buffers grow in multiples of this many tokens


class FusedDecoder:
    """Plays `decoder` with the native kernels. Weights are shared with it, not copied."""

    def __init__(self, decoder: Decoder, links: RankLinks | None = None) -> None:
        """`links`: the decoder is one rank's part of a larger one."""
        reason = why_not(decoder)
        library = native_library.native()
        if reason is not None or library is None:
            raise ValueError(f"this decoder cannot be fused: {reason}")
        self.decoder, self.spec, self.dtype, self.library = decoder, decoder.spec, decoder.dtype, library
        decoder.rotary.rotation_at(torch.zeros(0, dtype=torch.int64))  # makes the table
        assert decoder.rotary.table is not None
        self.cosine, self.sine = (table.contiguous() for table in decoder.rotary.table)
        self.links = links
        self.tap: StreamTap | None = None  # of a draft head
        self._buffers: StepBuffers | None = None
        self._made_for: tuple[KVCache, StreamTap | None] | None = None
        self._lists: dict[bool, OpList] = {}  # for steps without adapters, and with some

    @property
    def weight_bytes(self) -> int:
        return self.decoder.weight_bytes

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute a step, write its keys and values; the normed hidden states of `batch.logit_rows`. The result of
        a stage that is not the last goes to the next one, and is empty here."""
        links = self.links
        last = links is None or links.part.last
        tokens, outputs = len(batch.token_ids), len(batch.logit_rows) if last else 0
        hidden = torch.empty((outputs, self.spec.hidden), dtype=torch.float32)
        if tokens == 0:
            return hidden
        operations = self._operations(cache, max(tokens, outputs), batch.adapters is not None)
        if last:
            operations.set_result(hidden)
        vocabulary = self.spec.vocab_size if links is None else links.part.whole.vocab_size
        step = native_step(batch, cache, outputs, vocabulary, len(self.cosine))
        if batch.adapters is not None:
            step.token_groups = _groups(batch.adapters.tokens)
            if last:  # other stages have no output rows
                step.output_groups = _groups(batch.adapters.outputs)
        if links is None and cache.on_layer is None:
            self.library.play(operations.ops, step)
            return hidden
        stream = operations.buffers.hidden.values[:tokens]
        if links is not None and links.part.first:
            stream.copy_(embed_slice(self.decoder.embed, links.part, batch.token_ids, links))
        elif links is not None:
            stream.copy_(links.receive_stream(len(stream), self.dtype))
        for segment in operations.segments:
            if len(segment.ops):
                self.library.play(segment.ops, step)
            if segment.partial is not None and links is not None:
                links.sum_slices(segment.partial.values[: outputs if segment.over_outputs else tokens])
            if segment.layer is not None and cache.on_layer is not None:
                cache.on_layer(segment.layer)
        if links is not None and not links.part.last:
            links.send_stream(stream.clone())
        return hidden

    def _operations(self, cache: KVCache, rows: int, adapted: bool) -> OpList:
        """Made anew for another cache or tap, and where a step has more rows than the buffers."""
        if self._buffers is None or self._made_for != (cache, self.tap) or self._buffers.room.rows < rows:
            if cache.key_storage.dtype not in KV_FORMATS or cache.key_storage.device.type != "cpu":
                raise ValueError(
                    "the fused decoder needs a cache in host memory, in float32 or 8 bits, got "
                    f"{cache.key_storage.dtype}"
                )
            self._buffers = StepBuffers(self.decoder, self.library, -(-rows // ROWS_STEP) * ROWS_STEP)
            self._made_for, self._lists = (cache, self.tap), {}
        if adapted not in self._lists:
            tables = self.cosine, self.sine
            self._lists[adapted] = OpList(
                self.decoder, tables, self.links, cache, self._buffers, self.tap, adapted
            )
        return self._lists[adapted]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocabulary]."""
        head = self._head
        own = head(hidden) if head.packed is not None else float_linear(hidden, head.weight, head.bias)
        return own if self.links is None else self.links.gather_vocabulary(own)

    @property
    def _head(self) -> Linear:
        return self.decoder.embed if self.spec.tied_embeddings else self.decoder.head


def why_not(decoder: Decoder) -> str | None:
    """What keeps a decoder from being fused, or None."""
    spec, library = decoder.spec, native_library.native()
    if library is None:
        return "the native kernels are not available"
    if spec.moe is not None or spec.mla is not None:
        return "mixture-of-experts and latent attention run layer by layer"
    if decoder.dtype != torch.float32:
        return f"it computes in {decoder.dtype}, the kernels in float32"
    for name in ("hidden", "head_dim", "ffn_hidden"):
        if getattr(spec, name) % library.lanes:
            return f"{name} {getattr(spec, name)} is not a multiple of the vector width {library.lanes}"
    for name, module in decoder.named_modules():
        if not isinstance(module, Linear):
            continue
        if module.packed is None:
            if not (module.weight.device.type == "cpu" and module.weight.is_contiguous()):
                return f"{name}.weight is not a contiguous tensor in host memory"
        elif not isinstance(module.packed, PackedWeight | PackedFloat8) or module.packed.library is None:
            return f"{name} is packed in a format the kernels do not know"
        elif isinstance(module.packed, PackedFloat8):
            if name == "embed":
                return "the embedding is stored in 8-bit floats"
        elif module.packed.order is not None:
            return f"{name} reads its inputs in an order of its own"
    return None


def _groups(groups: AdapterGroups) -> GroupsStruct:
    return GroupsStruct(
        rows=pointer(groups.rows, torch.int32),
        starts=pointer(groups.starts, torch.int32),
        slots=pointer(groups.slots, torch.int32),
        count=len(groups.slots),
    )
