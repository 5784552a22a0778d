"""HeadRounds: a draft head on the GPU, which sees what the model computes and drafts behind it. CudaRunner's.

Of a step without drafts it keeps keys and values, so that it can continue at any time. In a step of rounds, each
round ends here: what agrees with the drafts is kept, and the next ones are written behind it, without the host.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.plan import Rounds, StepPlan, round_rows
from cumulo.engine.decide.speculation.rounds import DRAFTS, MOST_DRAFTS, MOST_ROUNDS, MOST_ROWS
from cumulo.engine.play.cuda.device_slots import DeviceSlots
from cumulo.engine.play.cuda.step_words import StepShape
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan
from cumulo.kernels.cuda.elementwise.step_inputs import step_inputs
from cumulo.kernels.cuda.sampling.greedy_rounds import (
    MOST_TILED,
    accept_likeliest,
    fits_tiles,
    likeliest_tiles,
    tile_parts,
)
from cumulo.kernels.cuda.sampling.rounds import (
    NextInputs,
    RoundRows,
    accept,
    propose,
    round_inputs,
)
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
        # Of greedy draws: each part's largest logit, and whose it is.
        parts = (MOST_TILED, tile_parts(model.vocab_size))
        self._best = torch.empty(parts, dtype=torch.float32, device=device)
        self._places = torch.empty(parts, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        tapped = 0 if self.model.tapped is None else self.model.tapped.nbytes
        own = (self.rows.told, self._next_tokens, self._best, self._places)
        return self.head.nbytes + tapped + sum(one.nbytes for one in own)

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

    def enter_round(self, shape: StepShape, attention: AttentionPlan) -> bool:
        """Everything that the first layer of a round reads, in one launch, where that is possible."""
        slots, lanes, words, model = self.slots, shape.rows, self.slots.words, self.model
        if shape.rounds is None or attention.items is None:
            return False
        if attention.windows != (None,) or not model.enters_plainly:
            return False
        attention.tables = slots.step_tables[:lanes]
        inputs = NextInputs(
            slots.token_ids[:lanes], slots.positions[:lanes], slots.kv_slots[:lanes], slots.contexts[:lanes],
            attention.tables, attention.items[0], attention.decode.key_tile, attention.decode.min_tiles,
        )  # fmt: skip
        round_inputs(
            words[:lanes], words[lanes : 2 * lanes], slots.tokens, slots.tables, slots.block_size,
            model.decoder.embed.weight, inputs, model.stream[:lanes],
        )  # fmt: skip
        return True

    @property
    def draws_without_logits(self) -> bool:
        """Whether rounds whose draws are all greedy need no logits here. Not where bits must not depend on the
        batch: sums have another order than in the products of other steps."""
        model, weight = self.model, self.model.head
        plain = isinstance(weight, Tensor) and (weight.element_size() == 2 or not weight.is_cuda)
        alone = model.slice is None and model.stage is None and model.rows is None and not model.invariant
        return plain and alone and fits_tiles(1, model.spec.hidden)

    def end_round(
        self, shape: StepShape, rounds: Rounds, picked: Tensor, attention: AttentionPlan, chain: AttentionPlan
    ) -> None:
        """After the draws of a round: keep what agrees, and draft. `attention`: the round's; `chain`: of a step
        with one token for each sequence."""
        slots, lanes, head, words = self.slots, shape.rows, self.head, self.slots.words
        rows = self.rows.first(rows_of(shape, rounds))
        count = len(rows.slots)
        plan = (words[:lanes], words[lanes : 2 * lanes], slots.query_starts(shape), slots.views(shape)[1])
        if shape.greedy:
            best, places = self._likeliest_of_lanes(lanes)
            accept_likeliest(
                *plan, best, places, picked, slots.token_ids, self._next_tokens, slots.tokens, rows,
                rounds.drafts,
            )  # fmt: skip
        else:
            accept(*plan, picked, slots.token_ids, self._next_tokens, rows, rounds.drafts)
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
            propose(
                *head.likeliest(stream), head.token_of, rows, slots.tokens, slots.tables, slots.block_size,
                ahead, inputs if ahead < rounds.drafts else None,
            )  # fmt: skip

    def _likeliest_of_lanes(self, lanes: int) -> tuple[Tensor, Tensor]:
        """Of each part of the model's vocabulary the largest logit behind each lane, and whose it is."""
        model = self.model
        assert isinstance(model.head, Tensor)
        parts = tile_parts(model.vocab_size)
        best, places = (
            one.view(-1)[: lanes * parts].view(lanes, parts) for one in (self._best, self._places)
        )
        likeliest_tiles(
            model.stream[:lanes], model.head, model.decoder.final_norm.weight, model.spec.norm_eps, best, places
        )  # fmt: skip
        return best, places

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

    def told(self, rows: int, rounds: Rounds, turn: int) -> NDArray[np.int32]:
        """[rows, rounds, 1 + places]: drafts kept, and tokens drawn. `turn`: of the first round."""
        room, size = self.rows.told_rounds(rounds.drafts), rounds.drafts + 2
        words = self._arrived[:rows, : room * size].numpy().reshape(rows, room, size)
        copied: NDArray[np.int32] = words[:, (turn + np.arange(rounds.times)) % room]
        return copied


@dataclass(slots=True)
class RoundsAhead:
    """Rounds that were launched behind a step, before the host has seen its tokens. They are the first ones of
    the next plan if it goes on where that step ended; else what they drew is forgotten: it lies behind the
    known tokens, where every step writes before it reads."""

    shape: StepShape
    slots: list[int]
    owners: NDArray[np.int64]  # how many sequences the slots had held
    count: int
    turn: int  # of the first
    starts: list[int] | None = None  # where the rows stood before them; None until that is known

    def are_first_of(self, plan: StepPlan, shape: StepShape, owners: NDArray[np.int64]) -> bool:
        return (
            plan.rounds is not None
            and plan.rounds.times > self.count
            and (shape, plan.slots, plan.starts) == (self.shape, self.slots, self.starts)
            and np.array_equal(owners[plan.slots], self.owners)
            and not (plan.begin or plan.replace or plan.copies or plan.swap_out or plan.swap_in)
        )


def round_shape(rows: int, rounds: Rounds, most: StepShape, cuts: bool, greedy: bool = False) -> StepShape:
    """The shape of one round: every token that is verified is a row of its own, as if it were decoded alone.
    `greedy`: all draws are, and need no logits if they are few."""
    lanes = min(round_rows(rows * (rounds.drafts + 1)), most.rows, most.tokens, most.draws)
    greedy = greedy and lanes <= MOST_TILED
    return StepShape(lanes, lanes, lanes, True, cuts, rounds=rounds._replace(times=1), greedy=greedy)


def rows_of(shape: StepShape, rounds: Rounds) -> int:
    """How many sequences a round of this shape has, at most."""
    return -(-shape.rows // (rounds.drafts + 1))


def warm_rounds(most: StepShape, greedy: bool = False) -> list[StepShape]:
    """Every shape that a round may have. `greedy`: those of greedy draws may need no logits."""
    found = []
    for rounds in (Rounds(1, drafts) for drafts in DRAFTS):
        for rows in range(1, MOST_ROWS + 1):
            if rows <= most.rows and rows * (rounds.drafts + 1) <= most.draws:
                found += [round_shape(rows, rounds, most, cuts) for cuts in (False, True)]
                found += [round_shape(rows, rounds, most, False, greedy=True)] if greedy else []
    return list(dict.fromkeys(found))
