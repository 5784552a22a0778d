"""FusedDecoder: a whole step of a dense decoder in one call of the native kernels. A runner uses it in place
of the torch `Decoder` it was made from, wherever `why_not` has nothing to say.

The layers become a flat list of operations (native/program.h) once; a step then only says how many tokens
there are and where its tables lie, and one team of threads plays the list: no Python, no allocation and no
thread start between layers. Same interface as `Decoder`: `forward` gives hidden states, `logits` makes
logits of them.
"""

import ctypes
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cumulo.kernels.cpu import library as native_library
from cumulo.kernels.cpu.float_linear import float_linear
from cumulo.kernels.cpu.library import OpStruct, QuantizedRowsStruct, StepStruct
from cumulo.kernels.cpu.packed_linear import PackedWeight, QuantizedBuffer
from cumulo.kernels.cpu.paged_attention import attention_fields
from cumulo.models.attention import Attention
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.linear import Linear
from cumulo.models.moe import FeedForward
from cumulo.models.play.rank_decoder import embed_slice
from cumulo.models.play.rank_links import RankLinks

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
        self._program: _Program | None = None

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
        program = self._program
        if program is None or program.cache is not cache or program.rows < max(tokens, outputs):
            rows = -(-max(tokens, outputs) // ROWS_STEP) * ROWS_STEP
            program = self._program = _Program(self, cache, rows)
        if last:
            program.set_result(hidden)
        tables = batch.block_tables.contiguous()
        step = StepStruct(
            tokens=tokens,
            sequences=len(batch.context_lengths),
            outputs=outputs,
            table_stride=tables.shape[1],
            vocabulary=self.spec.vocab_size if links is None else links.part.whole.vocab_size,
            position_limit=len(self.cosine),
            blocks=cache.blocks,
            block_size=cache.block_size,
            token_ids=_pointer(batch.token_ids, torch.int64),
            positions=_pointer(batch.positions, torch.int64),
            slots=_pointer(batch.slots, torch.int64),
            output_rows=_pointer(batch.logit_rows, torch.int64),
            query_starts=_pointer(batch.query_starts, torch.int32),
            context_lengths=_pointer(batch.context_lengths, torch.int32),
            block_tables=_pointer(tables, torch.int32),
        )
        if links is not None:
            self._play_with_others(program, step, batch, links)
        elif cache.on_layer is None:
            self.library.play(program.ops, step)
        else:
            for layer, part in enumerate(program.parts):
                self.library.play(part, step)
                if layer < self.spec.layers:
                    cache.on_layer(layer)
        return hidden

    def _play_with_others(
        self, program: "_Program", step: StepStruct, batch: ForwardBatch, links: RankLinks
    ) -> None:
        stream = program.hidden.values[: step.tokens]
        if links.part.first:
            stream.copy_(embed_slice(self.decoder.embed, links.part, batch.token_ids, links))
        else:
            stream.copy_(links.receive_stream(len(stream), self.dtype))
        for segment in program.segments:
            self.library.play(segment.ops, step)
            if segment.partial is not None:
                links.sum_slices(
                    segment.partial.values[: step.outputs if segment.over_outputs else step.tokens]
                )
        if not links.part.last:
            links.send_stream(stream.clone())

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocabulary]."""
        head = self.decoder.embed if self.spec.tied_embeddings else self.decoder.head
        return head(hidden) if head.packed is not None else float_linear(hidden, head.weight, head.bias)


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
        elif not isinstance(module.packed, PackedWeight) or module.packed.library is None:
            return f"{name} is packed in a format the kernels do not know"
        elif module.packed.order is not None:
            return f"{name} reads its inputs in an order of its own"
    return None


def _pointer(tensor: Tensor, dtype: torch.dtype) -> int:
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous {dtype} tensor, got {tensor.dtype} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


@dataclass(slots=True)
class _Activation:
    """A buffer of rows and, where packed matrices read it, its quantised form."""

    values: Tensor
    quantized: dict[int, QuantizedBuffer] = field(default_factory=dict)  # by activation bits

    @property
    def pointer(self) -> int:
        return self.values.data_ptr()


@dataclass(slots=True)
class _Segment:
    """Operations that follow each other without a word to other ranks."""

    ops: Any  # a ctypes array of OpStruct
    partial: _Activation | None = None  # what they leave is summed over ranks
    over_outputs: bool = False


class _Program:
    """The operations of one step for up to `rows` tokens over one cache, and the buffers they use."""

    def __init__(self, fused: FusedDecoder, cache: KVCache, rows: int) -> None:
        if cache.key_storage.dtype != torch.float32 or cache.key_storage.device.type != "cpu":
            raise ValueError(
                f"the fused decoder needs a float32 cache in host memory, got {cache.key_storage.dtype}"
            )
        self.cache, self.rows, self.library = cache, rows, fused.library
        spec = self.spec = fused.spec
        self._list: list[OpStruct] = []
        self._sums: list[tuple[int, _Activation | None, bool]] = []  # after so many operations, of what
        self._fused = fused
        links = fused.links
        self._last_stage = links is None or links.part.last
        self._summed = links is not None and links.tensor is not None
        # Of the ranks that sum up, one adds the stream so far.
        self._accumulate = links is None or links.part.carries_stream
        heads = spec.heads * spec.head_dim
        self.hidden = self._buffer(spec.hidden)
        self.normed = self._buffer(spec.hidden)
        self.qkv = self._buffer(heads + 2 * spec.kv_heads * spec.head_dim)
        self.mixed = self._buffer(heads)
        self.gate_up = self._buffer(2 * spec.ffn_hidden)
        self.activated = self._buffer(spec.ffn_hidden)
        # What is wanted of the last layer is usually a few rows; from its attention on only they are computed.
        self.wanted_hidden = self._buffer(spec.hidden)
        self.wanted_mixed = self._buffer(heads)
        if links is None:
            self._embed()
        ends = []
        for layer in range(spec.layers):
            self._layer(layer)
            ends.append(len(self._list))
        if self._last_stage:
            norm = fused.decoder.final_norm.weight
            self._norm(self.wanted_hidden, norm, self.normed, None, over_outputs=True)
        self.ops = (OpStruct * len(self._list))(*self._list)
        # The same operations layer by layer, for a cache that wants to be told; the rest is the last part.
        self.parts = [self._part(*bounds) for bounds in pairwise([0, *ends, len(self._list)])]
        # And between the sums over ranks.
        self._sums.append((len(self._list), None, False))
        begins = [0, *(end for end, _, _ in self._sums)]
        self.segments = [
            _Segment(self._part(begin, end), partial, over_outputs)
            for begin, (end, partial, over_outputs) in zip(begins, self._sums, strict=False)
            if end > begin
        ]

    def _part(self, first: int, end: int) -> Any:
        return (OpStruct * (end - first)).from_buffer(self.ops, first * ctypes.sizeof(OpStruct))

    def _sum(self, partial: _Activation, over_outputs: bool) -> None:
        """What other ranks have of the same rows is added before anything goes on."""
        if self._summed:
            self._sums.append((len(self._list), partial, over_outputs))

    def set_result(self, hidden: Tensor) -> None:
        self.ops[len(self.ops) - 1].out = hidden.data_ptr()

    def _buffer(self, columns: int) -> _Activation:
        return _Activation(torch.empty((self.rows, columns), dtype=torch.float32))

    # -- operations ------------------------------------------------------------------------------------
    def _embed(self) -> None:
        embed = self._fused.decoder.embed
        if isinstance(embed.packed, PackedWeight):
            self._list.append(
                OpStruct(
                    kind=native_library.EMBED,
                    columns=self.spec.hidden,
                    out=self.hidden.pointer,
                    parts=len(embed.packed.structs),
                    packed=ctypes.addressof(embed.packed.structs),
                )
            )
            return
        self._list.append(
            OpStruct(
                kind=native_library.EMBED_FLOAT,
                columns=self.spec.hidden,
                out=self.hidden.pointer,
                weight=embed.weight.data_ptr(),
            )
        )

    def _layer(self, index: int) -> None:
        spec, layer = self.spec, self._fused.decoder.layers[index]
        assert isinstance(layer, Layer)
        attention, ffn = layer.attention, layer.ffn
        assert isinstance(attention, Attention) and isinstance(ffn, FeedForward)  # why_not has checked
        cache_fields = attention_fields(
            self.cache.keys[index], self.cache.values[index], spec.heads, attention.scale, attention.window
        )
        self._norm(self.hidden, layer.attention_norm.weight, self.normed, attention.qkv)
        self._linear(self.normed, attention.qkv, self.qkv)
        self._list.append(
            OpStruct(
                kind=native_library.ROTATE,
                columns=self.qkv.values.shape[1],
                out=self.qkv.pointer,
                query_norm=attention.q_norm.weight.data_ptr() if spec.qk_norm else None,
                key_norm=attention.k_norm.weight.data_ptr() if spec.qk_norm else None,
                cosine=self._fused.cosine.data_ptr(),
                sine=self._fused.sine.data_ptr(),
                interleaved=int(spec.rope_interleaved),
                eps=spec.norm_eps,
                **cache_fields,
            )
        )
        self._list.append(
            OpStruct(
                kind=native_library.ATTEND,
                columns=self.qkv.values.shape[1],
                out_columns=self.mixed.values.shape[1],
                x=self.qkv.pointer,
                out=self.mixed.pointer,
                **cache_fields,
            )
        )
        last = self._last_stage and index == spec.layers - 1
        hidden, mixed = (self.wanted_hidden, self.wanted_mixed) if last else (self.hidden, self.mixed)
        if last:
            self._gather(self.hidden, hidden)
            self._gather(self.mixed, mixed)
        self._quantize(mixed, attention.output, last)
        self._linear(mixed, attention.output, hidden, accumulate=self._accumulate, over_outputs=last)
        self._sum(hidden, last)
        self._norm(hidden, layer.ffn_norm.weight, self.normed, ffn.gate_up, last)
        self._linear(self.normed, ffn.gate_up, self.gate_up, over_outputs=last)
        self._list.append(
            OpStruct(
                kind=native_library.SILU_MUL,
                over_outputs=int(last),
                columns=spec.ffn_hidden,
                x=self.gate_up.pointer,
                **self._destination(self.activated, ffn.down),
            )
        )
        self._linear(self.activated, ffn.down, hidden, accumulate=self._accumulate, over_outputs=last)
        self._sum(hidden, last)

    def _norm(
        self,
        x: _Activation,
        weight: Tensor,
        to: _Activation,
        reader: Linear | None,
        over_outputs: bool = False,
    ) -> None:
        self._list.append(
            OpStruct(
                kind=native_library.NORM,
                over_outputs=int(over_outputs),
                columns=x.values.shape[1],
                x=x.pointer,
                weight=weight.data_ptr(),
                eps=self.spec.norm_eps,
                **self._destination(to, reader),
            )
        )

    def _quantize(self, x: _Activation, reader: Linear, over_outputs: bool) -> None:
        if reader.packed is not None:
            self._list.append(
                OpStruct(
                    kind=native_library.QUANTIZE,
                    over_outputs=int(over_outputs),
                    columns=x.values.shape[1],
                    x=x.pointer,
                    quantized=self._quantized(x, reader.packed),
                )
            )

    def _gather(self, x: _Activation, to: _Activation) -> None:
        self._list.append(
            OpStruct(
                kind=native_library.GATHER,
                over_outputs=1,
                columns=x.values.shape[1],
                x=x.pointer,
                out=to.pointer,
            )
        )

    def _linear(
        self,
        x: _Activation,
        linear: Linear,
        to: _Activation,
        accumulate: bool = False,
        over_outputs: bool = False,
    ) -> None:
        op = OpStruct(
            over_outputs=int(over_outputs),
            columns=linear.shape[1],
            out_columns=linear.shape[0],
            out=to.pointer,
            bias=None if linear.bias is None else linear.bias.data_ptr(),
            accumulate=int(accumulate),
        )
        if isinstance(linear.packed, PackedWeight):
            op.kind = native_library.LINEAR
            op.parts, op.packed = len(linear.packed.structs), ctypes.addressof(linear.packed.structs)
            op.quantized = self._quantized(x, linear.packed)
        else:
            op.kind, op.x, op.weight = native_library.FLOAT_LINEAR, x.pointer, linear.weight.data_ptr()
        self._list.append(op)

    def _destination(self, to: _Activation, reader: Linear | None) -> dict[str, int | QuantizedRowsStruct]:
        """Where an operation leaves its result: quantised if a packed matrix reads it, else plain."""
        if reader is None or reader.packed is None:
            return {"out": to.pointer}
        return {"quantized": self._quantized(to, reader.packed)}

    def _quantized(self, x: _Activation, weight: object) -> QuantizedRowsStruct:
        assert isinstance(weight, PackedWeight)
        bits = weight.activation_bits
        if bits not in x.quantized:
            x.quantized[bits] = QuantizedBuffer(self.library, self.rows, x.values.shape[1], bits)
        return x.quantized[bits].struct
