"""FusedDecoder: a whole step of a dense decoder in one call of the native kernels. A runner uses it in place
of the torch `Decoder` it was made from, wherever `why_not` has nothing to say.

The layers become a flat list of operations (native/program.h) once; a step then only says how many tokens
there are and where its tables lie, and one team of threads plays the list: no Python, no allocation and no
thread start between layers. Same interface as `Decoder`: `forward` gives hidden states, `logits` makes
logits of them.
"""

import torch
from torch import Tensor

from cumulo.kernels.cpu import library as native_library
from cumulo.kernels.cpu.float_linear import float_linear
from cumulo.kernels.cpu.library import GroupsStruct, StepStruct
from cumulo.kernels.cpu.packed_float8 import PackedFloat8
from cumulo.kernels.cpu.packed_linear import PackedWeight
from cumulo.kernels.low_rank import AdapterGroups
from cumulo.models.batch import ForwardBatch, KVCache
from cumulo.models.decoder import Decoder
from cumulo.models.heads.tap import StreamTap
from cumulo.models.linear import Linear
from cumulo.models.play.fused_program import FusedProgram, OpList, StepBuffers
from cumulo.models.play.native_step import native_step, pointer
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
        self.tap: StreamTap | None = None  # of a draft head
        self._program: FusedProgram | None = None

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
        if (
            program is None
            or program.cache is not cache
            or program.tap is not self.tap
            or program.rows < max(tokens, outputs)
        ):
            rows = -(-max(tokens, outputs) // ROWS_STEP) * ROWS_STEP
            tables = self.cosine, self.sine
            program = FusedProgram(self.decoder, tables, links, self.library, cache, rows, self.tap)
            self._program = program
        operations = program.operations(batch.adapters is not None)
        if last:
            operations.set_result(hidden)
        vocabulary = self.spec.vocab_size if links is None else links.part.whole.vocab_size
        step = native_step(batch, cache, outputs, vocabulary, len(self.cosine))
        if batch.adapters is not None:
            step.token_groups = _groups(batch.adapters.tokens)
            step.output_groups = _groups(batch.adapters.outputs)
        if links is not None:
            self._play_with_others(program.buffers, operations, step, batch, links)
        elif cache.on_layer is None:
            self.library.play(operations.ops, step)
        else:
            for layer, part in enumerate(operations.parts):
                self.library.play(part, step)
                if layer < self.spec.layers:
                    cache.on_layer(layer)
        return hidden

    def _play_with_others(
        self,
        buffers: StepBuffers,
        operations: OpList,
        step: StepStruct,
        batch: ForwardBatch,
        links: RankLinks,
    ) -> None:
        stream = buffers.hidden.values[: step.tokens]
        if links.part.first:
            stream.copy_(embed_slice(self.decoder.embed, links.part, batch.token_ids, links))
        else:
            stream.copy_(links.receive_stream(len(stream), self.dtype))
        for segment in operations.segments:
            self.library.play(segment.ops, step)
            if segment.partial is not None:
                links.sum_slices(
                    segment.partial.values[: step.outputs if segment.over_outputs else step.tokens]
                )
        if not links.part.last:
            links.send_stream(stream.clone())

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocabulary]."""
        head = self._head
        return head(hidden) if head.packed is not None else float_linear(hidden, head.weight, head.bias)

    @property
    def _head(self) -> Linear:
        return self.decoder.embed if self.spec.tied_embeddings else self.decoder.head

    def peaks(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """The largest of each row's logits and its token, the first of equals, where they can be had in less time
        than all of them."""
        head = self._head
        packed = head.packed
        if not isinstance(packed, PackedWeight) or not packed.finds_best_rows:
            return None
        return packed.best_rows(hidden) if head.bias is None and head.adapted is None else None


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
