"""RandomPlanner: makes random but legal StepPlans, for tests of runners. The opposite of a good scheduler.

It does everything a plan may say (chunks of any size, shuffled blocks, forks with copy-on-write, beams that
permute, swapping, recomputation) for no reason, and checks every token against an oracle.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import NewSlot, Runner, StepPlan


@dataclass
class Sequence:
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    sample_index: int
    computed: int = 0
    slot: int = -1  # -1: not in the runner
    blocks: list[int] | None = None
    host_blocks: list[int] | None = None
    samples_left: int = 0  # parallel samples to fork when the first token is drawn


Oracle = Callable[[Sequence], int]


class RandomPlanner:
    def __init__(
        self, runner: Runner, oracle: Oracle, *, blocks: int, host_blocks: int, block_size: int, slots: int,
        longest: int, seed: int,
    ) -> None:  # fmt: skip
        self.runner, self.oracle, self.block_size, self.longest = runner, oracle, block_size, longest
        self.random = random.Random(seed)
        self.references = [0] * blocks
        self.free = list(range(blocks))
        self.random.shuffle(self.free)
        self.host_free = list(range(host_blocks))
        self.slots_free = list(range(slots))
        self.sequences: list[Sequence] = []
        self.index = 0
        self.checked = 0

    def add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)

    def step(self) -> None:
        """Plan one step, play it, compare what was drawn."""
        plan = StepPlan(self.index)
        self.index += 1
        fresh: set[int] = set()  # slots that began or were forked in this plan: not changed again
        for sequence in [s for s in self.sequences if s.slot >= 0 and len(s.tokens) >= self.longest]:
            plan.end.append(sequence.slot)
            self._release(sequence)
            self.sequences.remove(sequence)
        for sequence in list(self.sequences):
            if sequence.slot >= 0 and self.random.random() < 0.1:
                self._leave(sequence, plan)
            elif sequence.slot < 0 and self.random.random() < 0.7:
                self._enter(sequence, plan, fresh)
        self._permute(plan, fresh)
        self._fork_somebody(plan, fresh)
        draws = self._rows(plan, fresh)
        result = self.runner.submit(plan).result()
        assert not result.errors
        assert len(result.tokens) == len(draws)
        for (sequence, position), token in zip(draws, result.tokens, strict=True):
            expected = self.oracle(replace(sequence, tokens=sequence.tokens[:position]))
            assert token == expected, f"step {plan.index}, slot {sequence.slot}, position {position}"
            sequence.tokens.append(token)
            self.checked += 1

    # -- what may happen to a sequence --------------------------------------------------------------------
    def _enter(self, sequence: Sequence, plan: StepPlan, fresh: set[int]) -> None:
        needed = -(-sequence.computed // self.block_size) if sequence.host_blocks is not None else 0
        if not self.slots_free or len(self.free) < max(needed, 1):
            return
        sequence.slot = self.slots_free.pop(self.random.randrange(len(self.slots_free)))
        sequence.blocks = [self._allocate() for _ in range(needed)]
        if sequence.host_blocks is not None:
            plan.swap_in += zip(sequence.host_blocks, sequence.blocks, strict=True)
            # A host block is free only after the step: swap_out comes first within one.
            self.host_free += sequence.host_blocks
            sequence.host_blocks = None
        self._begin(sequence, plan, fresh)

    def _begin(self, sequence: Sequence, plan: StepPlan, fresh: set[int]) -> None:
        plan.begin.append(
            NewSlot(
                sequence.slot, list(sequence.tokens), sequence.prompt_length, list(sequence.blocks or []),
                sequence.params, sequence.seed, sequence.sample_index,
            )
        )  # fmt: skip
        fresh.add(sequence.slot)

    def _leave(self, sequence: Sequence, plan: StepPlan) -> None:
        """Preempted: by swapping if there is room on the host and a coin says so, else to be recomputed."""
        assert sequence.blocks is not None
        used = sequence.blocks[: -(-sequence.computed // self.block_size)]
        # swap_in of this plan has given back host blocks that are still read; swap only before any.
        if used and len(self.host_free) >= len(used) and self.random.random() < 0.6 and not plan.swap_in:
            sequence.host_blocks = [self.host_free.pop() for _ in used]
            plan.swap_out += zip(used, sequence.host_blocks, strict=True)
        else:
            sequence.computed = 0
        self._release(sequence)

    def _permute(self, plan: StepPlan, fresh: set[int]) -> None:
        """Two sequences change slots."""
        there = [s for s in self.sequences if s.slot >= 0 and s.slot not in fresh]
        if len(there) < 2 or self.random.random() > 0.3:
            return
        one, other = self.random.sample(there, 2)
        one.slot, other.slot = other.slot, one.slot
        self._begin(one, plan, fresh)
        self._begin(other, plan, fresh)

    def _fork_somebody(self, plan: StepPlan, fresh: set[int]) -> None:
        """A beam's second child: same tokens but the last one, same blocks."""
        there = [
            s for s in self.sequences
            if s.slot >= 0 and s.slot not in fresh and s.computed == len(s.tokens) - 1 >= s.prompt_length
        ]  # fmt: skip
        if not there or not self.slots_free or self.random.random() > 0.4:
            return
        parent = self.random.choice(there)
        tokens = [*parent.tokens[:-1], self.random.randrange(3, 9)]
        self._fork(parent, tokens, plan, fresh, sample_index=self.random.randrange(5, 99))

    def _fork(
        self, parent: Sequence, tokens: list[int], plan: StepPlan, fresh: set[int], sample_index: int
    ) -> Sequence:
        blocks = list(parent.blocks or [])
        for block in blocks:
            self.references[block] += 1
        child = replace(
            parent, tokens=list(tokens), slot=self.slots_free.pop(), blocks=blocks, sample_index=sample_index,
            samples_left=0,
        )  # fmt: skip
        self._begin(child, plan, fresh)
        self.sequences.append(child)
        return child

    # -- rows ---------------------------------------------------------------------------------------------
    def _rows(self, plan: StepPlan, fresh: set[int]) -> list[tuple[Sequence, int]]:
        there = [s for s in self.sequences if s.slot >= 0]
        self.random.shuffle(there)
        draws: list[tuple[Sequence, int]] = []
        for sequence in there:
            left = len(sequence.tokens) - sequence.computed
            count = self.random.randint(0, left)
            if count == 0 or not self._make_room(sequence, sequence.computed + count, plan, fresh):
                continue
            plan.slots.append(sequence.slot)
            plan.starts.append(sequence.computed)
            plan.counts.append(count)
            sequence.computed += count
            if sequence.computed == len(sequence.tokens):
                drawn_into = [sequence]
                while sequence.samples_left and self.slots_free:
                    drawn_into.append(  # samples share the row
                        self._fork(sequence, sequence.tokens, plan, fresh, sample_index=sequence.samples_left)
                    )
                    sequence.samples_left -= 1
                sequence.samples_left = 0
                for receiver in drawn_into:
                    plan.draw_rows.append(len(plan.slots) - 1)
                    plan.draw_slots.append(receiver.slot)
                    draws.append((receiver, len(sequence.tokens)))
        return draws

    def _make_room(self, sequence: Sequence, end: int, plan: StepPlan, fresh: set[int]) -> bool:
        """Blocks up to `end`, and private ones where something will be written."""
        assert sequence.blocks is not None
        first = sequence.computed // self.block_size
        last = (end - 1) // self.block_size
        shared = [i for i in range(first, len(sequence.blocks)) if self.references[sequence.blocks[i]] > 1]
        missing = last + 1 - len(sequence.blocks)
        if len(self.free) < len(shared) + max(0, missing):
            return False
        for i in shared:
            old, new = sequence.blocks[i], self._allocate()
            self.references[old] -= 1
            sequence.blocks[i] = new
            plan.replace.append((sequence.slot, i, new))
            plan.copies.append((old, new))
        for _ in range(missing):
            block = self._allocate()
            sequence.blocks.append(block)
            plan.extend.append((sequence.slot, block))
        return True

    def _allocate(self) -> int:
        block = self.free.pop(self.random.randrange(len(self.free)))
        self.references[block] = 1
        return block

    def _release(self, sequence: Sequence) -> None:
        for block in sequence.blocks or []:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)
        self.slots_free.append(sequence.slot)
        sequence.slot, sequence.blocks = -1, None
