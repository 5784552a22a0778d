"""Sequences in lockstep: each draws one token in every step, so all of them are one addition. Kept by `simulate`.

Of a sequence that draws in every step, the position that a plan computes is the plan's index less a constant, its
offset. So nothing need be written down for it from step to step: when it fills a block and when it ends is known
beforehand, and its tokens are entered late, when somebody looks. To the scheduler, which plans on meanwhile, such
tokens are still being drawn (`Sequence.pending`), and it decides the same: one token is always in flight anyway.
Where its plan is not what lockstep says, `settle` enters all tokens and everybody goes his own way.
"""

from collections.abc import Mapping
from typing import NamedTuple

from cumulo.engine.decide.books import Flight
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.request import Sequence, State
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.step_result import enter_result
from cumulo.engine.simulate.run import InFlight, Run, Served, close_ended


class Member(NamedTuple):
    sequence: Sequence
    offset: int  # of a plan's index over the position that it computes
    shared_tokens: int  # of its context, that an earlier sequence holds, too
    since: int  # index of the first plan that it is in as a member


class Lockstep:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._clear()

    def _clear(self) -> None:
        self.sequences: list[Sequence] = []  # in the scheduler's order
        self.offsets: list[int] = []  # theirs
        self.offset_sum = self.shared_tokens = 0
        self.at_block_end: dict[int, list[Member]] = {}  # by the offset modulo a block's size
        self.ending: dict[int, list[Member]] = {}  # by the index of the last plan they are in
        self.rows_in: dict[int, int] = {}  # of plans in flight: as many rows, the first ones, are members'

    # -- who belongs to it --------------------------------------------------------------------------------
    def join(self, shared: Mapping[int, int], last_result_s: float) -> bool:
        """Everybody who runs, if all of them only decode: have nothing to compute but the token in flight."""
        index, size = self.scheduler.books.next_plan.index, self.scheduler.config.block_size
        running = [sequence for sequence in self.scheduler.running if sequence.state == State.RUNNING]
        if running[: len(self.sequences)] != self.sequences:
            self.settle(last_result_s)
        newcomers = running[len(self.sequences) :]
        for sequence in newcomers:
            computed = sequence.computed
            if (
                sequence.pending != 1
                or computed != len(sequence.tokens)
                or computed < sequence.prompt_length
                or sequence.shares_tail
                or sequence.request.beam is not None
            ):
                return False
        for sequence in newcomers:
            if sequence.computed + 1 < sequence.limit:  # else its last token is being drawn
                offset = index - sequence.computed
                member = Member(sequence, offset, shared.get(sequence.slot, 0), index)
                self.sequences.append(sequence)
                self.offsets.append(offset)
                self.offset_sum += offset
                self.shared_tokens += member.shared_tokens
                self.at_block_end.setdefault(offset % size, []).append(member)
                self.ending.setdefault(offset + sequence.limit - 2, []).append(member)
        return True

    def _leave(self, member: Member) -> None:
        at = self.sequences.index(member.sequence)
        del self.sequences[at], self.offsets[at]
        self.offset_sum -= member.offset
        self.shared_tokens -= member.shared_tokens
        phase = member.offset % self.scheduler.config.block_size
        self.at_block_end[phase].remove(member)
        if not self.at_block_end[phase]:
            del self.at_block_end[phase]

    def settle(self, last_result_s: float) -> None:
        """Enter all tokens that have been drawn; nobody is in lockstep any more."""
        taken = self.scheduler.books.next_plan.index - 1 - len(self.scheduler.books.in_flight)
        for sequence, offset in zip(self.sequences, self.offsets, strict=True):
            if taken - offset + 2 > len(sequence.tokens):
                _enter(sequence, taken - offset + 2)
                sequence.request.tag.last_token_s = last_result_s
        self._clear()

    # -- plans and results --------------------------------------------------------------------------------
    def follow(self, plan: StepPlan | None, last_result_s: float) -> None:
        """The scheduler has made a plan: does it go on with everybody, or did somebody have to give way?"""
        if plan is None:
            self.settle(last_result_s)
            return
        sequences, index = self.sequences, plan.index
        starts = [index - offset for offset in self.offsets]
        leaving = [member.sequence for member in self.ending.get(index - 1, ())]  # not in this plan any more
        if leaving:
            starts = [start for start, one in zip(starts, sequences, strict=True) if one not in leaving]
            sequences = [one for one in sequences if one not in leaving]
        count, rows = len(sequences), self.scheduler.books.in_flight[index].rows
        stayed = all(one.state == State.RUNNING for one in leaving)
        if stayed and plan.starts[:count] == starts and rows[:count] == sequences:
            self.rows_in[index] = count
        else:
            self.settle(last_result_s)

    def take(self, index: int, now_s: float) -> None:
        """A plan's result: what it filled can be found from now on, and who drew the last token ends."""
        scheduler, pool, size = self.scheduler, self.scheduler.pool, self.scheduler.config.block_size
        if pool.prefix_cache:
            for sequence, offset, _, since in self.at_block_end.get((index + 1) % size, ()):
                if since <= index:
                    known = index + 1 - offset
                    _enter(sequence, known)
                    block = known // size - 1
                    pool.register(sequence.blocks[block], sequence.extend_hashes(block + 1, size)[block])
        if index in self.ending:
            for member in self.ending.pop(index):
                self._leave(member)
                sequence = member.sequence
                _enter(sequence, sequence.limit)
                sequence.computed, sequence.pending = sequence.limit - 1, 0
                sequence.request.tag.last_token_s = now_s
                scheduler.finish(sequence, "length", now_s)
            close_ended(scheduler)

    def go_on_from(self, plan: StepPlan) -> None:
        """All plans up to this one have been made, with a row for each of us: as if the scheduler had done it."""
        next_index, rows = plan.index + 1, self.sequences[:]
        for sequence, offset in zip(rows, self.offsets, strict=True):
            sequence.computed = computed = next_index - offset
            sequence.pending = computed + 1 - len(sequence.tokens)
        plan.slots = plan.draw_slots = [sequence.slot for sequence in rows]
        plan.starts = [plan.index - offset for offset in self.offsets]
        plan.counts, plan.draw_rows = [1] * len(rows), list(range(len(rows)))
        scheduler = self.scheduler
        scheduler.running[:], scheduler.books.next_plan.index = rows, next_index
        scheduler.books.in_flight[plan.index] = Flight(rows, rows)
        self.rows_in[plan.index] = len(rows)


def take_result(ready: InFlight, now_s: float, lockstep: Lockstep, run: Run) -> None:
    """A step's tokens arrive: who gained one, and who has ended."""
    plan, scheduler = ready.plan, lockstep.scheduler
    run.most_blocks = max(run.most_blocks, scheduler.pool.used_count)
    scheduler.costs.observe_compute(plan.tokens, len(plan.slots), ready.time.device_s)
    same, same_s = lockstep.rows_in.pop(plan.index, 0), run.last_result_s
    flight = scheduler.books.in_flight.pop(plan.index)
    advanced: list[Sequence] = []
    if same:
        lockstep.take(plan.index, now_s)
    if same < len(flight.rows):
        rest = StepPlan(plan.index, starts=plan.starts[same:], counts=plan.counts[same:])
        rows, draws = flight.rows[same:], flight.draws[same:]
        advanced = enter_result(
            scheduler.books, Flight(rows, draws), rest, StepResult([0] * len(draws)), now_s
        )
    others: dict[float, int] = {}
    for sequence in advanced:
        served: Served = sequence.request.tag
        before_s = served.last_token_s
        served.last_token_s = now_s
        if before_s == same_s:
            same += 1
        elif before_s is None:
            served.first_token_s = now_s
        else:
            others[before_s] = others.get(before_s, 0) + 1
    if same:
        others[same_s] = same
    for before_s, count in others.items():
        run.gaps_s.append(now_s - before_s)
        run.gap_counts.append(count)
    run.last_result_s = now_s
    close_ended(scheduler)


def _enter(sequence: Sequence, known: int) -> None:
    """Tokens up to `known`, which were drawn meanwhile: which ones is all the same."""
    tokens = sequence.tokens
    drawn = known - len(tokens)
    tokens.frombytes(bytes(tokens.itemsize * drawn))
    sequence.pending -= drawn
    sequence.request.share.output_tokens += drawn
