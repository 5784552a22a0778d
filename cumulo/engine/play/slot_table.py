"""The runner's memory of live sequences: tokens, block tables and sampling parameters, one row per slot.

Plans carry only changes, so a step of a thousand decoding sequences is read out of these arrays with a few
array operations. Only beginnings and block changes are handled one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cumulo.engine.decide.beams import candidates_per_beam
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, TokenLogprobs
from cumulo.engine.guides.guided import Guidance, GuidedSlots
from cumulo.engine.sampling.distribution import Ints, seed_bits
from cumulo.engine.sampling.sampler import DRAW_COLUMNS, DrawBatch, LogitEdits, TokenPairs, token_logprobs
from cumulo.kernels.low_rank import AdapterRows, group_rows
from cumulo.models.batch import ForwardBatch

_NOTHING = np.zeros(0, dtype=np.int64)
# A temperature below this leaves no second candidate at float precision; it keeps 0 / 0 out of the sampler.
_COLDEST = 1e-30


@dataclass(slots=True)
class StepRows:
    """A plan's row columns as arrays, and where each row's tokens begin among the step's tokens."""

    slots: Ints
    starts: Ints
    counts: Ints
    query_starts: Ints  # [rows + 1]

    @staticmethod
    def from_columns(slots: Ints, starts: Ints, counts: Ints) -> "StepRows":
        return StepRows(slots, starts, counts, np.concatenate(([0], np.cumsum(counts))))

    @property
    def ends(self) -> Ints:
        return self.starts + self.counts


NO_ROWS = StepRows.from_columns(_NOTHING, _NOTHING, _NOTHING)


class SlotTable:
    """Owns the per-slot state of one runner. Only the runner's thread touches it."""

    def __init__(
        self,
        max_slots: int,
        max_context: int,
        block_size: int,
        eos_token_ids: Sequence[int] = (),
        guidance: Guidance | None = None,
    ) -> None:
        self.block_size, self.max_context = block_size, max_context
        self.eos_token_ids = tuple(eos_token_ids)
        # Zeroed memory of this size is only reserved: the system commits a page when it is first written,
        # so what is used grows with the tokens held, not with max_slots * max_context.
        self.tokens = np.zeros((max_slots, max_context + 1), dtype=np.int32)
        self.tables = np.zeros((max_slots, -(-(max_context + 1) // block_size)), dtype=np.int32)
        self.lengths = np.zeros(max_slots, dtype=np.int64)  # tokens known
        self.block_counts = np.zeros(max_slots, dtype=np.int64)
        self.prompt_lengths = np.zeros(max_slots, dtype=np.int64)
        self.min_tokens = np.zeros(max_slots, dtype=np.int64)
        self.adapters = np.full(max_slots, -1, dtype=np.int32)  # slots in the AdapterBank
        self.serves_adapters = False
        self.columns = np.zeros(max_slots, dtype=DRAW_COLUMNS)
        self.params: list[SamplingParams | None] = [None] * max_slots
        self.guided = GuidedSlots(guidance)  # or what ranks share of it

    @property
    def nbytes(self) -> int:
        """Bytes reserved; those committed are fewer (see __init__)."""
        arrays = (self.tokens, self.tables, self.lengths, self.block_counts, self.columns)
        return sum(array.nbytes for array in arrays)

    # -- changes ------------------------------------------------------------------------------------------
    def apply(self, plan: StepPlan) -> None:
        """The plan's begin, extend and replace, in this order."""
        for new in plan.begin:
            self.tokens[new.slot, : len(new.tokens)] = new.tokens
            self.lengths[new.slot] = len(new.tokens)
            self.prompt_lengths[new.slot] = new.prompt_length
            self.adapters[new.slot] = new.adapter
            self._set_blocks(new.slot, new.blocks)
            self._set_params(new.slot, new.params, new.seed, new.sample_index)
        for slot, block in plan.extend:
            self.tables[slot, self.block_counts[slot]] = block
            self.block_counts[slot] += 1
        for slot, index, block in plan.replace:
            self.tables[slot, index] = block

    def write_drawn(self, slots: Ints, positions: Ints, tokens: Ints) -> None:
        self.tokens[slots, positions] = tokens
        self.lengths[slots] = positions + 1

    def end(self, slots: list[int]) -> None:
        for slot in slots:
            self.lengths[slot] = self.block_counts[slot] = 0
            self.params[slot] = None
            self.guided.end(slot)

    def _set_blocks(self, slot: int, blocks: list[int]) -> None:
        self.tables[slot, : len(blocks)] = blocks
        self.block_counts[slot] = len(blocks)

    def _set_params(self, slot: int, params: SamplingParams, seed: int, sample_index: int) -> None:
        logprobs = -1 if params.logprobs is None else 0 if params.logprob_token_ids else params.logprobs
        if params.best_of is not None:
            logprobs = max(logprobs, 0)  # the samples are ranked by theirs
        if params.beam_width is not None:
            stops = len(self.eos_token_ids) + len(params.stop_token_ids)
            logprobs = max(logprobs, candidates_per_beam(params.beam_width, stops))
        self.params[slot] = params
        self.guided.begin(slot, params.guide)
        self.min_tokens[slot] = params.min_tokens
        self.columns[slot] = (
            max(params.temperature, _COLDEST),
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            seed_bits(seed),
            sample_index,
            params.greedy or params.beam_width is not None,
            logprobs,
            params.edits_logits,
        )

    # -- reading ------------------------------------------------------------------------------------------
    def rows(self, plan: StepPlan) -> StepRows:
        """The plan's rows, checked against what the slots hold: a wrong plan must not compute garbage."""
        slots = np.array(plan.slots, dtype=np.int64)
        starts = np.array(plan.starts, dtype=np.int64)
        counts = np.array(plan.counts, dtype=np.int64)
        rows = StepRows.from_columns(slots, starts, counts)
        wrong = (counts < 1) | (starts < 0) | (rows.ends > self.lengths[slots])
        wrong |= rows.ends > self.block_counts[slots] * self.block_size
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            slot = int(slots[row])
            raise RuntimeError(
                f"step {plan.index} computes tokens {starts[row]} to {rows.ends[row]} of slot {slot}, which "
                f"holds {self.lengths[slot]} tokens and {self.block_counts[slot]} blocks of {self.block_size}"
            )
        return rows

    def forward_batch(
        self, rows: StepRows, logit_rows: Ints, device: torch.device | str = "cpu"
    ) -> ForwardBatch:
        """The decoder's input for all rows of a step, without a loop over them."""
        ends = rows.ends
        if int(rows.query_starts[-1]) == len(rows.slots):  # every row is one token: a pure decode step
            token_slots, positions = rows.slots, rows.starts
        else:
            token_slots = np.repeat(rows.slots, rows.counts)
            first = np.repeat(rows.starts - rows.query_starts[:-1], rows.counts)
            positions = first + np.arange(len(token_slots))
        blocks = self.tables[token_slots, positions // self.block_size].astype(np.int64)
        widest = -(-int(ends.max(initial=0)) // self.block_size)

        on_host = str(device) == "cpu"

        def tensor(array: NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
            made = torch.from_numpy(array.astype(dtype))
            return made if on_host else made.to(device)

        return ForwardBatch(
            token_ids=tensor(self.tokens[token_slots, positions], np.int64),
            positions=tensor(positions, np.int64),
            slots=tensor(blocks * self.block_size + positions % self.block_size, np.int64),
            query_starts=tensor(rows.query_starts, np.int32),
            context_lengths=tensor(ends, np.int32),
            block_tables=tensor(self.tables[rows.slots, :widest], np.int32),
            logit_rows=tensor(logit_rows, np.int64),
            adapters=self.adapter_rows(rows, logit_rows, device) if self.serves_adapters else None,
        )

    def adapter_rows(
        self, rows: StepRows, logit_rows: Ints, device: torch.device | str
    ) -> AdapterRows | None:
        """The step's rows by adapter, grouped once for all matrices; None: no row has one."""
        held = self.adapters[rows.slots]
        if held.max(initial=-1) < 0:
            return None
        of_token = np.repeat(held, rows.counts)
        return AdapterRows(group_rows(of_token, device), group_rows(of_token[logit_rows], device))

    def draw_batch(self, slots: Ints, positions: Ints, logit_rows: Ints, vocabulary: int) -> DrawBatch:
        """The sampler's input for draws into `slots` at `positions`."""
        columns = self.columns[slots]
        short = positions - self.prompt_lengths[slots] < self.min_tokens[slots]
        batch = DrawBatch(logit_rows, positions, columns)
        for draw in np.flatnonzero(columns["logprobs"] >= 0).tolist():
            if (params := self.params[slots[draw]]) is not None and params.logprob_token_ids:
                batch.told[draw] = [one for one in params.logprob_token_ids if one < vocabulary]
        if self.guided:

            def output_before(draw: int) -> NDArray[np.int32]:
                return self.tokens[slots[draw], self.prompt_lengths[slots[draw]] : positions[draw]]

            batch.masks = masks = self.guided.masks(slots, output_before, vocabulary)
            if masks is not None and short.any():
                # A complete answer ends: min_tokens yields where the guide allows nothing but the end.
                for row, draw in enumerate(masks.draws.tolist()):
                    short[draw] &= masks.allows_others(row, self._ends(int(slots[draw]), vocabulary))
        if columns["edited"].any() or short.any():
            edited = np.flatnonzero(columns["edited"] | short)
            batch.edits = self._edits(edited, slots, positions, short, vocabulary)
        return batch

    def _edits(
        self, draws: Ints, slots: Ints, positions: Ints, short: NDArray[np.bool_], vocabulary: int
    ) -> LogitEdits:
        """Which single logits change. Penalties are read off the tokens themselves, so there is no second
        record of them that a forked or resumed sequence could leave stale.
        """
        bias: list[tuple[int, list[int]]] = []
        values: list[float] = []
        seen: list[tuple[int, NDArray[np.int32]]] = []
        output: list[tuple[int, NDArray[np.int32]]] = []
        forbidden: list[tuple[int, tuple[int, ...]]] = []
        for draw in draws.tolist():
            slot, position = int(slots[draw]), int(positions[draw])
            params = self.params[slot]
            if params is None:
                raise RuntimeError(f"a token is drawn for slot {slot}, which holds no sequence")
            # Tokens the model has no logit for cannot be drawn: there is nothing to change.
            biased = {token: value for token, value in params.logit_bias.items() if token < vocabulary}
            bias.append((draw, list(biased)))
            values += biased.values()
            if params.repetition_penalty != 1:
                seen.append((draw, self.tokens[slot, :position]))
            if params.presence_penalty or params.frequency_penalty:
                output.append((draw, self.tokens[slot, int(self.prompt_lengths[slot]) : position]))
            if short[draw]:
                forbidden.append((draw, self._ends(slot, vocabulary)))
        return LogitEdits(
            bias=TokenPairs.joined(bias),
            bias_values=np.array(values, dtype=np.float64),
            seen=TokenPairs.joined(seen),
            output=TokenPairs.joined(output),
            forbidden=TokenPairs.joined(forbidden),
        )

    def prompt_logprobs(
        self, slot: int, start: int, count: int, logits_of: Callable[[int, int], torch.Tensor], most: int = 64
    ) -> list[TokenLogprobs]:
        """The log-probabilities of `count` tokens behind position `start`, by the model's distribution: bias and
        penalties shape what is drawn, not what was given. `logits_of`: of so many places from one on, counted from
        `start`; at most `most` at a time, to bound their memory."""
        params, entries = self.params[slot], list[TokenLogprobs]()
        wanted = (params.prompt_logprobs or 0) if params is not None else 0
        for first in range(0, count, most):
            size = min(most, count - first)
            logits = logits_of(first, size)
            if logits.dtype not in (torch.float32, torch.float64):
                logits = logits.float()
            tokens = self.tokens[slot, start + first + 1 : start + first + 1 + size].astype(np.int64)
            entries += token_logprobs(logits, tokens, np.full(size, wanted))
        return entries

    def _ends(self, slot: int, vocabulary: int) -> tuple[int, ...]:
        """Tokens that would end the slot's sequence."""
        params = self.params[slot]
        ends = {*self.eos_token_ids, *(params.stop_token_ids if params is not None else ())}
        return tuple(token for token in ends if token < vocabulary)
