"""FusedEagle: an Eagle head's step in one call of the native kernels. A drafter plays it in place of `EagleDraft`
wherever `why_not_head` has nothing to say.
"""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.kernels.cpu import library as native_library
from cumulo.kernels.cpu.library import NativeLibrary, OpStruct, StepStruct
from cumulo.kernels.cpu.packed_linear import PackedColumns, PackedWeight
from cumulo.kernels.cpu.paged_attention import attention_fields
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.heads.eagle import EagleHead, Likeliest, StreamTap
from cumulo.models.linear import Linear
from cumulo.models.play.fused import native_step
from cumulo.models.play.op_writer import ActivationRoom, OpWriter

_ROWS_STEP = 16  # buffers grow in multiples of this many tokens
MOST_OF_ONE = _ROWS_STEP  # tokens that follow_one takes


class FusedEagle:
    shift = 1

    def __init__(self, head: EagleHead, embed: Linear, tap: StreamTap) -> None:
        """`embed`: the served model's. `tap`: what the head sees of its stream."""
        library = native_library.native()
        reason = why_not_head(head, embed)
        if reason is not None or library is None:
            raise ValueError(f"this head cannot be fused: {reason}")
        self._head, self._embed, self._tap, self._library = head, embed, tap, library
        head.rotary.rotation_at(torch.zeros(0, dtype=torch.int64))  # makes the table
        assert head.rotary.table is not None
        self._tables = head.rotary.table[0].contiguous(), head.rotary.table[1].contiguous()
        self._kept, self._token_of = tap.kept.numpy(), head.token_of.numpy()
        self._program: _HeadProgram | None = None

    @property
    def weight_bytes(self) -> int:
        return self._head.weight_bytes

    def follow(
        self, batch: ForwardBatch, cache: KVCache, previous: Tensor | None
    ) -> tuple[Tensor, Likeliest]:
        tokens, outputs = len(batch.token_ids), len(batch.logit_rows)
        program = self._program_for(tokens, cache)
        if previous is None:
            torch.index_select(self._tap.kept, 0, batch.slots, out=program.tapped.values[:tokens])
        else:
            program.stream.values[:tokens] = previous
        step = native_step(batch, cache, outputs, self._embed.shape[0], len(self._tables[0]))
        self._library.play(program.behind_tokens if previous is None else program.behind_drafts, step)
        found = program.likeliest.numpy()[:outputs]
        tokens_of = self._head.token_of.numpy()[found.view(np.int32)[:, 1]]
        return program.wanted.values[:outputs].clone(), (tokens_of, found[:, 0].copy())

    def follow_one(
        self, tokens: list[int], start: int, blocks: NDArray[np.int32], cache: KVCache, behind_own: bool
    ) -> tuple[int, float]:
        """`follow` for up to MOST_OF_ONE tokens of one sequence from place `start` on, whose blocks are given: the
        most likely next token and its chance. `behind_own`: the token is this head's last proposal. Between a
        model's steps the host's caches are cold, so that every operation that is saved here counts."""
        program = self._program_for(len(tokens), cache)
        step, size = program.one, cache.block_size
        for row, token in enumerate(tokens):
            place = start + row
            slot = int(blocks[place // size]) * size + place % size
            step.token_ids[row], step.positions[row], step.slots[row] = token, place, slot
            if not behind_own:
                program.tapped_rows[row] = self._kept[slot]
        if behind_own:
            program.stream_rows[0] = program.wanted_rows[0]
        step.play(
            self._library,
            program.behind_drafts if behind_own else program.behind_tokens,
            blocks,
            start,
            len(tokens),
        )
        return int(self._token_of[program.found[0]]), float(program.chances[0])

    def _program_for(self, tokens: int, cache: KVCache) -> "_HeadProgram":
        program = self._program
        if program is None or program.cache is not cache or program.rows < tokens:
            rows = -(-tokens // _ROWS_STEP) * _ROWS_STEP
            program = self._program = _HeadProgram(
                self._head, self._embed, self._tables, self._library, cache, rows
            )
        return program


class _OneSequence:
    """A step of one sequence, in arrays that are used again."""

    def __init__(self, cache: KVCache, vocabulary: int, position_limit: int) -> None:
        self.token_ids, self.positions, self.slots = (np.zeros(MOST_OF_ONE, np.int64) for _ in range(3))
        self._last, self._ends = np.zeros(1, np.int64), np.zeros(3, np.int32)  # query starts, context length
        self._struct = StepStruct(
            sequences=1,
            outputs=1,
            vocabulary=vocabulary,
            position_limit=position_limit,
            blocks=cache.blocks,
            block_size=cache.block_size,
            token_ids=self.token_ids.ctypes.data,
            positions=self.positions.ctypes.data,
            slots=self.slots.ctypes.data,
            output_rows=self._last.ctypes.data,
            query_starts=self._ends.ctypes.data,
            context_lengths=self._ends[2:].ctypes.data,
        )

    def play(
        self,
        library: NativeLibrary,
        ops: "ctypes.Array[OpStruct]",
        blocks: NDArray[np.int32],
        start: int,
        count: int,
    ) -> None:
        step = self._struct
        self._last[0], self._ends[1], self._ends[2] = count - 1, count, start + count
        step.tokens, step.table_stride, step.block_tables = count, len(blocks), blocks.ctypes.data
        library.play(ops, step)


class _HeadProgram:
    """The operations for up to `rows` tokens over one cache: behind known tokens, where the stream is the served
    model's, and behind the head's own proposals, where it is its own."""

    def __init__(
        self, head: EagleHead, embed: Linear, tables: tuple[Tensor, Tensor], library: NativeLibrary,
        cache: KVCache, rows: int,
    ) -> None:  # fmt: skip
        self.cache, self.rows = cache, rows
        spec = head.spec
        room = ActivationRoom(library, rows)
        self.tapped = room.buffer(head.fc.shape[1])
        self.stream = room.buffer(spec.hidden)
        self.wanted = room.buffer(spec.hidden)
        self.likeliest = torch.empty((rows, 2), dtype=torch.float32)
        logits = room.buffer(head.head.shape[0])
        width = spec.heads * spec.head_dim
        tokens, mixed, wanted_mixed = room.buffer(spec.hidden), room.buffer(width), room.buffer(width)
        # One normed form each: the two norms are read by different halves of a matrix, one after the other.
        normed, qkv = room.buffer(spec.hidden), room.buffer(head.qkv.shape[0])
        gate_up, activated = room.buffer(2 * spec.ffn_hidden), room.buffer(spec.ffn_hidden)
        fields = attention_fields(cache.keys[0], cache.values[0], spec.heads, spec.head_dim**-0.5, None)
        assert isinstance(head.qkv.packed, PackedColumns)
        of_token, of_stream = head.qkv.packed.parts
        self._writers = (OpWriter(room, spec.norm_eps), OpWriter(room, spec.norm_eps))
        for first, writer in zip((True, False), self._writers, strict=True):
            if first:
                writer.quantize(self.tapped, head.fc)
                writer.linear(self.tapped, head.fc, self.stream)
            writer.embed(embed, tokens)
            writer.norm(tokens, head.token_norm.weight, normed, of_token)
            writer.packed(normed, of_token, qkv)
            writer.norm(self.stream, head.stream_norm.weight, normed, of_stream)
            writer.packed(normed, of_stream, qkv, accumulate=True)
            writer.rotate(qkv, tables, fields, interleaved=int(spec.rope_interleaved))
            writer.attend(qkv, mixed, fields)
            writer.gather(self.stream, self.wanted)
            writer.gather(mixed, wanted_mixed)
            writer.quantize(wanted_mixed, head.output, over_outputs=True)
            writer.linear(wanted_mixed, head.output, self.wanted, accumulate=True, over_outputs=True)
            writer.norm(self.wanted, head.ffn_norm.weight, normed, head.ffn.gate_up, over_outputs=True)
            writer.linear(normed, head.ffn.gate_up, gate_up, over_outputs=True)
            writer.silu_mul(gate_up, activated, head.ffn.down, over_outputs=True)
            writer.linear(activated, head.ffn.down, self.wanted, accumulate=True, over_outputs=True)
            writer.norm(self.wanted, head.final_norm.weight, normed, head.head, over_outputs=True)
            writer.linear(normed, head.head, logits, over_outputs=True)
            writer.likeliest(logits, self.likeliest)
        self.behind_tokens, self.behind_drafts = (writer.array() for writer in self._writers)
        self.one = _OneSequence(cache, embed.shape[0], len(tables[0]))
        self.tapped_rows, self.stream_rows, self.wanted_rows = (
            one.values.numpy() for one in (self.tapped, self.stream, self.wanted)
        )
        self.chances, self.found = self.likeliest.numpy()[:, 0], self.likeliest.numpy().view(np.int32)[:, 1]


def why_not_head(head: EagleHead, embed: Linear) -> str | None:
    """What keeps a head from being fused, or None."""
    spec, library = head.spec, native_library.native()
    if library is None:
        return "the native kernels are not available"
    if any(size % library.lanes for size in (spec.hidden, spec.head_dim, spec.ffn_hidden)):
        return f"a size is not a multiple of the vector width {library.lanes}"
    if not isinstance(head.qkv.packed, PackedColumns):
        return "its matrices are not packed"
    if embed.packed is None:
        if embed.weight.dtype != torch.float32 or not embed.weight.is_contiguous():
            return "the embedding is not in contiguous float32"
    elif not _suits(embed):
        return "the embedding is packed in a format the kernels do not know"
    for name, module in head.named_modules():
        if isinstance(module, Linear) and module is not head.qkv and not _suits(module):
            return f"{name} is not packed for the kernels"
    return None


def _suits(linear: Linear) -> bool:
    packed = linear.packed
    return isinstance(packed, PackedWeight) and packed.library is not None and packed.order is None
