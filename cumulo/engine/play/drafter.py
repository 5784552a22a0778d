"""Drafter: a small model that proposes what may come next. Owned by a runner, asked after it has drawn.

Its keys and values lie in a cache of its own under the same block tables, so that what a plan shares, copies or
frees is right for both. It computes a token when it is asked to continue behind it, not before: sequences for which
nothing is drafted cost nothing. What it holds never shows in a result: a wrong proposal is only not accepted.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.play.slot_table import SlotTable, StepRows
from cumulo.engine.sampling.distribution import Ints
from cumulo.models.batch import ForwardBatch, KVCache, RunnableModel
from cumulo.models.heads.eagle import EagleHead, Likeliest, StreamTap, likeliest_of
from cumulo.models.play.fused_eagle import MOST_OF_ONE, FusedEagle

_MOST_TOKENS = 512  # of prompts that are computed before one step's first proposals


Proposed = tuple[dict[int, list[int]], dict[int, list[float]]]  # tokens and chances, by draw


class DraftModel(Protocol):
    """What proposes: a whole decoder, or a head on the hidden states of the one that is served."""

    # 0: the token of a place is its input. 1: the token after it is, next to the hidden state of the place.
    shift: int

    @property
    def weight_bytes(self) -> int: ...

    def follow(
        self, batch: ForwardBatch, cache: KVCache, previous: Tensor | None
    ) -> tuple[Tensor, Likeliest]:
        """Compute the tokens and return, of `batch.logit_rows`, the hidden states, and the most likely next tokens
        with their chances. `previous`: hidden states returned for the places before, where these tokens are
        proposals themselves."""
        ...


class Drafter:
    def __init__(
        self, model: DraftModel, cache: KVCache, max_slots: int, limit: int, tap: StreamTap | None = None
    ) -> None:
        """`limit`: places that the model was made for. `tap`: what a head sees of the served model."""
        self.model, self.cache, self.limit, self.tap = model, cache, limit, tap
        self._followed = np.zeros(max_slots, dtype=np.int64)  # places whose keys and values are in the cache

    def memory_bytes(self) -> dict[str, int]:
        held = self.cache.nbytes + (0 if self.tap is None else self.tap.nbytes)
        return {"draft model": self.model.weight_bytes, "draft kv cache": held}

    def change(self, plan: StepPlan) -> None:
        for new in plan.begin:
            self._followed[new.slot] = 0
        self.cache.copy_blocks(plan.copies)
        if self.tap is not None:
            self.tap.copy_blocks(plan.copies, self.cache.block_size)

    def propose(self, wanted: list[tuple[int, int, int]], table: SlotTable, floor: float = 0.0) -> Proposed:
        """`wanted`: draw, slot and how many tokens. By draw, tokens proposed behind the known ones, with their
        chances: fewer where there is no room or where all of them are right with a chance below `floor`, none while
        its prompt is not computed."""
        if len(wanted) == 1 and isinstance(self.model, FusedEagle):
            draw, slot, count = wanted[0]
            start, end = int(self._followed[slot]), int(table.lengths[slot]) - self.model.shift
            if 0 < end - start <= MOST_OF_ONE:
                return self._propose_one(self.model, draw, slot, count, start, end, table, floor)
        draws, slots, counts = (np.array(column, dtype=np.int64) for column in zip(*wanted, strict=True))
        ends = table.lengths[slots] - self.model.shift  # places that the known tokens make
        room = np.minimum(table.block_counts[slots] * table.block_size, self.limit)
        keep = (ends > self._followed[slots]) & (ends <= room)
        draws, slots, ends = draws[keep], slots[keep], ends[keep]
        counts = np.minimum(counts[keep], room[keep] - ends + 1)
        # Long prompts in pieces: who is not complete in this step proposes in a later one.
        needed = ends - self._followed[slots]
        given = np.clip(_MOST_TOKENS - (np.cumsum(needed) - needed), 0, needed)
        if not given.any():
            return {}, {}
        begun, complete = given > 0, given == needed
        rows = StepRows.from_columns(slots[begun], self._followed[slots[begun]], given[begun])
        last = rows.query_starts[1:] - 1
        followed = self.model.follow(self._batch(rows, last[complete[begun]], table), self.cache, None)
        self._followed[slots] += given
        return self._continue(
            draws[complete], slots[complete], ends[complete], counts[complete], *followed, table, floor
        )

    def _propose_one(
        self, head: FusedEagle, draw: int, slot: int, count: int, start: int, end: int, table: SlotTable,
        floor: float,
    ) -> Proposed:  # fmt: skip
        """The same for one sequence of which few tokens are new, without arrays: most of a proposal's time is small
        operations. Places from `start` up to `end` are to be followed."""
        room = min(int(table.block_counts[slot]) * table.block_size, self.limit)
        if end > room:
            return {}, {}
        tokens, blocks = table.tokens[slot], table.tables[slot]
        most = min(count, room - end + 1)
        new: list[int] = tokens[start + 1 : end + 1].tolist()
        token, chance = head.follow_one(new, start, blocks, self.cache, False)
        self._followed[slot] = end
        proposed, chances = [token], [chance]
        together = chance
        while len(proposed) < most and together >= floor:
            place = end + len(proposed)
            tokens[place] = token  # behind the known tokens, where whatever is drawn will overwrite it
            token, chance = head.follow_one([token], place - 1, blocks, self.cache, True)
            proposed.append(token)
            chances.append(chance)
            together *= chance
        return {draw: proposed}, {draw: chances}

    def _continue(
        self,
        draws: Ints,
        slots: Ints,
        ends: Ints,
        counts: Ints,
        hidden: Tensor,
        likeliest: Likeliest,
        table: SlotTable,
        floor: float,
    ) -> Proposed:
        """Token after token, each proposed behind the one before, as long as somebody wants more."""
        proposed: dict[int, list[int]] = {draw: [] for draw in draws.tolist()}
        chances: dict[int, list[float]] = {draw: [] for draw in draws.tolist()}
        together = np.ones(len(draws))  # the chance that all are right
        place = 0
        while len(slots):
            tokens, likely = likeliest
            for draw, token, chance in zip(draws.tolist(), tokens.tolist(), likely.tolist(), strict=True):
                proposed[draw].append(token)
                chances[draw].append(chance)
            place += 1
            together = together * likely
            more = (counts > place) & (together >= floor)
            if not more.any():
                break
            draws, slots, ends, counts = draws[more], slots[more], ends[more], counts[more]
            together = together[more]
            # Behind the known tokens, where whatever is drawn will overwrite them.
            table.tokens[slots, ends + self.model.shift + place - 1] = tokens[more]
            rows = StepRows.from_columns(slots, ends + place - 1, np.ones(len(slots), dtype=np.int64))
            kept = hidden[torch.from_numpy(np.flatnonzero(more))]
            behind = self._batch(rows, np.arange(len(slots)), table)
            hidden, likeliest = self.model.follow(behind, self.cache, kept)
        return proposed, chances

    def _batch(self, rows: StepRows, wanted: Ints, table: SlotTable) -> ForwardBatch:
        batch = table.forward_batch(rows, wanted)
        batch.adapters = None  # of the model that is served
        if self.model.shift:
            places = batch.positions.numpy() + self.model.shift
            slots = np.repeat(rows.slots, rows.counts)
            batch.token_ids = torch.from_numpy(table.tokens[slots, places].astype(np.int64))
        return batch


class EagleDraft:
    """A head on a decoder whose stream is tapped."""

    shift = 1

    def __init__(
        self,
        head: EagleHead,
        embed: Callable[[Tensor], Tensor],
        stream_at: Callable[[Tensor], Tensor],
    ) -> None:
        self._head, self._embed, self._stream_at = head, embed, stream_at

    @property
    def weight_bytes(self) -> int:
        return self._head.weight_bytes

    def follow(
        self, batch: ForwardBatch, cache: KVCache, previous: Tensor | None
    ) -> tuple[Tensor, Likeliest]:
        stream = self._head.fc(self._stream_at(batch.slots)) if previous is None else previous
        hidden = self._head(stream, self._embed(batch.token_ids), batch, cache)
        chosen, chances = likeliest_of(self._head.logits(hidden))
        return hidden, (self._head.token_of.numpy()[chosen], chances)


class WholeDraftModel:
    """A decoder of the same tokenizer. The one that is served may have more tokens, or fewer: sizes of vocabularies
    are rounded up, and tokens are added."""

    shift = 0

    def __init__(self, model: RunnableModel, vocabulary: int, known: int) -> None:
        """`vocabulary`: tokens of the model that is served. `known`: of this one."""
        self._model, self._vocabulary, self._known = model, vocabulary, known

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def follow(
        self, batch: ForwardBatch, cache: KVCache, previous: Tensor | None
    ) -> tuple[Tensor, Likeliest]:
        if self._known < self._vocabulary:
            # What it does not know, it reads as another token; what it proposes then is only less likely right.
            batch.token_ids = torch.where(batch.token_ids < self._known, batch.token_ids, 0)
        hidden = self._model.forward(batch, cache)
        return hidden, likeliest_of(self._model.logits(hidden)[:, : self._vocabulary])
