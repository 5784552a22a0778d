"""Lockstep: sequences that each draw one token in every step, so that a plan repeats. A decision on the scheduler's
batch that any player may use; `simulate` does.

While nobody waits and everybody only decodes, each plan is the one before, one token further, until a sequence
needs a block or draws its last token. `plan` says how many times: what happens on the way is done as the scheduler
does it, in the same order, and where there is something to decide (blocks run short) it is left to the scheduler.

Of a member, the position that a plan computes is the plan's index less a constant, its offset. So nothing need be
written down for it from step to step: when it fills a block and when it ends is known beforehand, and its tokens
are entered late, when somebody looks. To the scheduler, which plans on meanwhile, such tokens are still being drawn
(`Sequence.pending`), and it decides the same: one token is always in flight anyway. Where its plan is not what
lockstep says, `settle` enters all tokens and everybody goes his own way. Requests that a drawn token can end are no
members, so it is all the same which tokens are entered; the simulator's are zeros.
"""

from collections.abc import Mapping
from typing import NamedTuple

from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Flight
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.core.step_result import enter_result
from cumulo.engine.decide.plan import StepPlan, StepResult


class Member(NamedTuple):
    sequence: Sequence
    offset: int  # of a plan's index over the position that it computes
    shared_tokens: int  # of its context, that an earlier sequence holds, too
    since: int  # index of the first plan that it is in as a member


class Repeat(NamedTuple):
    """`steps` plans of the same rows, one token each. What changes before them is in the batch' next plan."""

    first_index: int
    steps: int
    rows: int
    context_tokens: int  # that the first attends to; each further one attends to `rows` more
    shared_tokens: int  # of these, that an earlier sequence holds, too


class Lockstep:
    def __init__(self, batch: RequestBatch) -> None:
        self.batch = batch
        self.settled: list[Sequence] = []  # got tokens late since the player last looked; it empties the list
        self._clear()

    def _clear(self) -> None:
        self._sequences: list[Sequence] = []  # in the scheduler's order
        self._offsets: list[int] = []  # theirs
        self._offset_sum = self._shared_tokens = 0
        self._at_block_end: dict[int, list[Member]] = {}  # by the offset modulo a block's size
        self._ending: dict[int, list[Member]] = {}  # by the index of the last plan they are in
        self._rows_in: dict[int, int] = {}  # of plans in flight: as many rows, the first ones, are members'

    # -- who belongs to it --------------------------------------------------------------------------------
    def join(self, shared: Mapping[int, int]) -> bool:
        """Everybody who runs, if all of them only decode: have nothing to compute but the token in flight.
        `shared`: by slot, tokens of its context that an earlier sequence holds, too."""
        index, size = self.batch.next_plan.index, self.batch.config.block_size
        running = [sequence for sequence in self.batch.running if sequence.state == State.RUNNING]
        if running[: len(self._sequences)] != self._sequences:
            self.settle()
        newcomers = running[len(self._sequences) :]
        for sequence in newcomers:
            computed, request = sequence.computed, sequence.request
            if (
                sequence.pending != 1
                or computed != len(sequence.tokens)
                or computed < sequence.prompt_length
                or sequence.shares_tail
                or request.beam is not None
                or request.stop_ids
            ):
                return False
        for sequence in newcomers:
            if sequence.computed + 1 < sequence.limit:  # else its last token is being drawn
                offset = index - sequence.computed
                member = Member(sequence, offset, shared.get(sequence.slot, 0), index)
                self._sequences.append(sequence)
                self._offsets.append(offset)
                self._offset_sum += offset
                self._shared_tokens += member.shared_tokens
                self._at_block_end.setdefault(offset % size, []).append(member)
                self._ending.setdefault(offset + sequence.limit - 2, []).append(member)
        return True

    def _leave(self, member: Member) -> None:
        position = self._sequences.index(member.sequence)
        del self._sequences[position], self._offsets[position]
        self._offset_sum -= member.offset
        self._shared_tokens -= member.shared_tokens
        phase = member.offset % self.batch.config.block_size
        self._at_block_end[phase].remove(member)
        if not self._at_block_end[phase]:
            del self._at_block_end[phase]

    def settle(self) -> None:
        """Enter all tokens that have been drawn; nobody is in lockstep any more."""
        entered = self.batch.next_plan.index - 1 - len(self.batch.in_flight)
        for sequence, offset in zip(self._sequences, self._offsets, strict=True):
            if entered - offset + 2 > len(sequence.tokens):
                _enter(sequence, entered - offset + 2)
                self.settled.append(sequence)
        self._clear()

    # -- plans that repeat --------------------------------------------------------------------------------
    def plan(self) -> Repeat | None:
        """How many times the next plan repeats; its blocks are given. None where the scheduler has to decide."""
        plan, kv, size = self.batch.next_plan, self.batch.kv, self.batch.config.block_size
        index, ending, at_block_end = plan.index, self._ending, self._at_block_end
        leaving = ending.get(index - 1, ())
        rows = len(self._sequences) - len(leaving)
        wanting = [
            member.sequence
            for member in at_block_end.get(index % size, ())
            if member not in leaving and kv.needs_block(member.sequence, index - member.offset)
        ]
        if not rows or len(wanting) > self.batch.pool.free_count:
            return None
        for sequence in wanting:
            kv.give_block(sequence, sequence.capacity, plan)
        offset_sum, shared_tokens = self._offset_sum, self._shared_tokens
        for member in leaving:
            offset_sum -= member.offset
            shared_tokens -= member.shared_tokens
        following = index + 1
        while following - 1 not in ending and following % size not in at_block_end:
            following += 1
        return Repeat(index, following - index, rows, rows * (index + 1) - offset_sum, shared_tokens)

    def advance(self, steps: int) -> None:
        """So many plans have been made, and the results of all but the last are in or are entered next."""
        self.batch.next_plan.index += steps

    def apply(self, index: int, now_s: float) -> None:
        """A plan's result: what it filled can be found from now on, and who drew the last token ends."""
        batch, size = self.batch, self.batch.config.block_size
        if batch.pool.prefix_cache:
            for sequence, offset, _, since in self._at_block_end.get((index + 1) % size, ()):
                if since <= index:
                    known = index + 1 - offset
                    _enter(sequence, known)
                    batch.kv.register_blocks(sequence, known - 1, known)
        for member in self._ending.pop(index, ()):
            self._leave(member)
            sequence = member.sequence
            _enter(sequence, sequence.limit)
            sequence.computed, sequence.pending = sequence.limit - 1, 0
            batch.finish(sequence, "length", now_s)

    def last_plan(self) -> StepPlan:
        """The last plan that was made, in flight from now on; the batch are as if the scheduler had made all."""
        batch, rows = self.batch, self._sequences[:]
        next_index = batch.next_plan.index
        for sequence, offset in zip(rows, self._offsets, strict=True):
            sequence.computed = computed = next_index - offset
            sequence.pending = computed + 1 - len(sequence.tokens)
        starts = [next_index - 1 - offset for offset in self._offsets]
        plan = StepPlan(next_index - 1, slots=[sequence.slot for sequence in rows], starts=starts)
        plan.draw_one_each()
        batch.running[:] = rows
        batch.in_flight[plan.index] = Flight(rows, rows)
        self._rows_in[plan.index] = len(rows)
        return plan

    # -- plans of the scheduler ---------------------------------------------------------------------------
    def follow(self, plan: StepPlan | None) -> None:
        """The scheduler has made a plan: does it go on with everybody, or was somebody preempted?"""
        if plan is None:
            self.settle()
            return
        sequences, index = self._sequences, plan.index
        starts = [index - offset for offset in self._offsets]
        leaving = [member.sequence for member in self._ending.get(index - 1, ())]  # not in this plan any more
        if leaving:
            starts = [start for start, one in zip(starts, sequences, strict=True) if one not in leaving]
            sequences = [one for one in sequences if one not in leaving]
        count, rows = len(sequences), self.batch.in_flight[index].rows
        stayed = all(one.state == State.RUNNING for one in leaving)
        if stayed and plan.starts[:count] == starts and rows[:count] == sequences:
            self._rows_in[index] = count
        else:
            self.settle()

    def enter_result(self, plan: StepPlan, now_s: float) -> tuple[int, list[Sequence]]:
        """A plan's tokens arrive: how many members gained one, and which of the others."""
        flight, members = self.batch.in_flight.pop(plan.index), self._rows_in.pop(plan.index, 0)
        if members:
            self.apply(plan.index, now_s)
        if members == len(flight.rows):
            return members, []
        rest = StepPlan(plan.index, starts=plan.starts[members:], counts=plan.counts[members:])
        rest.sends = [send._replace(row=send.row - members) for send in plan.sends]
        others = Flight(flight.rows[members:], flight.draws[members:])
        return members, enter_result(self.batch, others, rest, StepResult([0] * len(others.draws)), now_s)


def _enter(sequence: Sequence, known: int) -> None:
    """Tokens up to `known`, which were drawn meanwhile."""
    tokens = sequence.tokens
    drawn = known - len(tokens)
    tokens.frombytes(bytes(tokens.itemsize * drawn))
    sequence.pending -= drawn
    sequence.request.usage.output_tokens += drawn
