"""HeadRounds: a draft head on the GPU, which sees what the model computes and drafts behind it. CudaRunner's.

Of a step without drafts it keeps keys and values, so that it can continue at any time. In a step of rounds, each
round ends here: what agrees with the drafts is kept, and the next ones are written behind it, without the host.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.plan import Rounds
from cumulo.engine.decide.speculation.rounds import MOST_DRAFTS, MOST_ROUNDS
from cumulo.engine.play.device_slots import DeviceSlots
from cumulo.engine.play.step_words import StepShape, round_rows
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from cumulo.kernels.cuda.elementwise.step_inputs import step_inputs
from cumulo.kernels.cuda.sampling.rounds import NextInputs, RoundRows, accept, propose, propose_next
from cumulo.models.batch import KVCache
from cumulo.models.play.cuda_decoder import CudaDecoder
from cumulo.models.play.cuda_eagle import CudaEagle


class HeadRounds:
    def __init__(self, head: CudaEagle, cache: KVCache, model: CudaDecoder, slots: DeviceSlots) -> None:
        self.head, self.cache, self.model, self.slots = head, cache, model, slots
        count, device = len(slots.contexts), slots.device
        self._next_tokens = torch.zeros(model.max_tokens, dtype=torch.int32, device=device)
        self._no_blocks = torch.full((len(slots.contexts),), -1, dtype=torch.int32, device=device)
        self.rows = RoundRows.zeros(count, MOST_ROUNDS * (MOST_DRAFTS + 2), device)
        on_gpu = device.type == "cuda"
        self._arrived = torch.zeros(self.rows.told.shape, dtype=torch.int32, pin_memory=on_gpu)

    @property
    def nbytes(self) -> int:
        tapped = 0 if self.model.tapped is None else self.model.tapped.nbytes
        return self.head.nbytes + tapped + self.rows.told.nbytes + self._next_tokens.nbytes

    def memory_bytes(self) -> dict[str, int]:
        return {
            "draft model": self.head.head.weight_bytes,
            "draft buffers": self.nbytes,
            "draft kv cache": self.cache.nbytes,
        }

    # -- launches, in the order of a step ---------------------------------------------------------------------
    def follow(self, shape: StepShape) -> None:
        """Keys and values of a step whose tokens are drawn."""
        words, size, tokens = self.slots.words, shape.rows, shape.tokens
        self._tokens_behind(words[:size], words[size : 2 * size], words[2 * size : 3 * size + 1], tokens)
        self._see(tokens)

    def begin(self) -> None:
        """Before a step's first round."""
        self.rows.turns.zero_()

    def end_round(
        self, shape: StepShape, rounds: Rounds, picked: Tensor, attention: AttentionPlan, chain: AttentionPlan
    ) -> None:
        """After the draws of a round: keep what agrees, and draft. `attention`: the round's; `chain`: of a step
        with one token for each sequence."""
        slots, lanes, head, words = self.slots, shape.rows, self.head, self.slots.words
        rows = self.rows.first(rows_of(shape, rounds))
        count = len(rows.slots)
        accept(
            words[:lanes], words[lanes : 2 * lanes], slots.query_starts(shape), slots.views(shape)[1], picked,
            slots.token_ids, self._next_tokens, rows, rounds.drafts,
        )  # fmt: skip
        stream, qkv = self._see(shape.tokens)
        stream = head.output(stream, qkv, attention, self.cache, rows.kept)
        inputs = self._next_inputs(count, chain)
        for ahead in range(1, rounds.drafts + 1):
            if ahead > 1:
                if inputs is None:
                    self._tokens_behind(rows.slots, rows.chain_starts, rows.one_each, count)
                    chain.prepare(rows.one_each, slots.contexts[:count], slots.step_tables[:count])
                qkv = head.see_own(
                    stream,
                    self._next_tokens[:count],
                    slots.positions[:count],
                    slots.kv_slots[:count],
                    self.cache,
                )
                stream = head.output(stream, qkv, chain, self.cache, None)
            if inputs is None:
                propose(head.logits_of(stream), head.token_of, rows, slots.tokens, ahead)
            else:
                propose_next(
                    *head.likeliest(stream), head.token_of, rows, slots.tokens, slots.tables, slots.block_size,
                    ahead, inputs if ahead < rounds.drafts else None,
                )  # fmt: skip

    def _next_inputs(self, count: int, chain: AttentionPlan) -> NextInputs | None:
        """Where a proposal leaves what the head's next step reads; None where other launches fill it in."""
        if chain.items is None or not self.head.fits(count):
            return None
        slots = self.slots
        chain.tables = slots.step_tables[:count]
        return NextInputs(
            self._next_tokens[:count], slots.positions[:count], slots.kv_slots[:count], slots.contexts[:count],
            chain.tables, chain.items[chain.windows.index(None)], chain.decode.key_tile, chain.decode.min_tiles,
        )  # fmt: skip

    def _see(self, tokens: int) -> tuple[Tensor, Tensor]:
        assert self.model.tapped is not None
        slots = self.slots
        return self.head.see(
            self.model.tapped[:tokens], self._next_tokens[:tokens], slots.positions[:tokens],
            slots.kv_slots[:tokens], self.cache,
        )  # fmt: skip

    def _tokens_behind(self, row_slots: Tensor, starts: Tensor, query_starts: Tensor, tokens: int) -> None:
        """Token ids one place further than the rows say; everything else as for the rows."""
        slots, size = self.slots, len(row_slots)
        none = self._no_blocks[:size]
        step_inputs(
            row_slots, starts, query_starts, none, none, slots.tokens[:, 1:], slots.tables, slots.block_size,
            self._next_tokens[:tokens], slots.positions[:tokens], slots.kv_slots[:tokens], slots.contexts[:size],
            slots.step_tables[:size],
        )  # fmt: skip

    # -- results ----------------------------------------------------------------------------------------------
    def send_back(self, rows: int) -> "torch.cuda.Event | None":
        self._arrived[:rows].copy_(self.rows.told[:rows], non_blocking=True)
        if self.slots.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def told(self, rows: int, rounds: Rounds) -> NDArray[np.int32]:
        """[rows, rounds, 1 + places]: drafts kept, and tokens drawn."""
        words = self._arrived[:rows, : rounds.times * (rounds.drafts + 2)].numpy()
        copied: NDArray[np.int32] = words.reshape(rows, rounds.times, rounds.drafts + 2).copy()
        return copied


def round_shape(rows: int, rounds: Rounds, most: StepShape, cuts: bool) -> StepShape:
    """Of one round: every token that is verified is a row of its own, as if it were decoded alone."""
    lanes = min(round_rows(rows * (rounds.drafts + 1)), most.rows, most.tokens, most.draws)
    return StepShape(lanes, lanes, lanes, True, cuts, rounds=Rounds(1, rounds.drafts))


def rows_of(shape: StepShape, rounds: Rounds) -> int:
    """How many sequences a round of this shape has, at most."""
    return -(-shape.rows // (rounds.drafts + 1))


def warm_rounds(most: StepShape, drafts: tuple[int, ...]) -> list[StepShape]:
    """Shapes that between them use every kernel of rounds."""
    found = []
    for places in drafts:
        rows = 1
        while rows <= most.rows and rows * (places + 1) <= most.draws:
            found += [round_shape(rows, Rounds(1, places), most, cuts) for cuts in (False, True)]
            rows = round_rows(rows + 1)
    return found
