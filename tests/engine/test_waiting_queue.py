"""Whose turn it is, compared with a queue that searches."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.core.request import Request, Sequence, State
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.sharing.queue import TenantQueue
from cumulo.engine.decide.sharing.tenants import FairShares
from tests import thorough

PARAMS = SamplingParams(max_tokens=4)


class Searching:
    """The same rule, written down as it is said: look at everybody."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Sequence]] = []
        self.pushes = 0

    def push(self, sequence: Sequence) -> None:
        self.pushes += 1
        self.waiting.append((self.pushes, sequence))

    def first(self) -> Sequence | None:
        heads: dict[str, tuple[tuple[tuple[float, int], int], Sequence]] = {}
        for push, sequence in self.waiting:
            key, name = (sequence.request.order, push), sequence.request.tenant
            if name not in heads or key < heads[name][0]:
                heads[name] = (key, sequence)
        if not heads:
            return None
        firsts = [sequence for _, sequence in heads.values()]
        level = min(firsts, key=lambda s: s.request.order).request.priority
        return min(
            (s for s in firsts if s.request.priority <= level),
            key=lambda s: (s.request.usage.counter, s.request.order),
        )

    def remove(self, sequence: Sequence) -> None:
        self.waiting = [entry for entry in self.waiting if entry[1] is not sequence]


@settings(max_examples=thorough.examples(150), deadline=None)
@given(seed=st.integers(0, 10**9), tenants=st.integers(1, 5), priorities=st.integers(1, 3))
def test_the_queue_agrees_with_one_that_searches(seed: int, tenants: int, priorities: int) -> None:
    rng = random.Random(seed)
    shares = FairShares()
    queue, searching = TenantQueue(shares), Searching()
    waiting: list[Sequence] = []
    admitted: list[Sequence] = []

    def leaves(sequence: Sequence) -> None:
        waiting.remove(sequence)
        searching.remove(sequence)

    for step in range(200):
        action = rng.random()
        if action < 0.4:
            made = Request(
                f"r{step}", [1], PARAMS, seed=0, tenant=str(rng.randrange(tenants)),
                priority=rng.randrange(priorities),
            )  # fmt: skip
            made.usage = shares.tenant(made.tenant)
            made.order = (step + 40.0 * made.priority, step)
            sequence = made.sequences[0]
            queue.arrive(sequence)
            searching.push(sequence)
            waiting.append(sequence)
        elif action < 0.65:
            first = queue.first()
            assert first is searching.first()
            if first is not None:
                queue.take_first()
                first.state = State.RUNNING
                first.request.usage.prompt_tokens += rng.randrange(1, 9)
                leaves(first)
                admitted.append(first)
        elif action < 0.75 and admitted:  # gives way and comes back, in its old place
            back = admitted.pop(rng.randrange(len(admitted)))
            queue.enter(back)
            searching.push(back)
            waiting.append(back)
        elif action < 0.85 and waiting:
            ends = rng.choice(waiting)
            ends.state = State.FINISHED
            queue.leave(ends)
            leaves(ends)
        elif action < 0.9 and waiting:  # a beam that was computed while it waited, and is queued again later
            beam = rng.choice(waiting)
            queue.set_aside(beam)
            searching.remove(beam)
            assert queue.first() is searching.first()
            queue.push(beam)
            searching.push(beam)
        elif admitted:
            rng.choice(admitted).request.usage.output_tokens += rng.randrange(1, 5)
        assert queue.count == len(waiting) == sum(tenant.waiting for tenant in shares.tenants.values())
    while (first := queue.first()) is not None:
        assert first is searching.first()
        queue.take_first()
        first.state = State.RUNNING
        leaves(first)
    assert queue.count == 0 and not waiting


def test_one_tenants_requests_come_in_order() -> None:
    shares, rng = FairShares(), random.Random(1)
    queue = TenantQueue(shares)
    orders = [(rng.random(), number) for number in range(300)]
    for number, order in enumerate(orders):
        made = Request(f"r{number}", [1], PARAMS, seed=0, priority=rng.randrange(5))
        made.usage, made.order = shares.tenant(""), order
        queue.arrive(made.sequences[0])
    came = []
    while (first := queue.first()) is not None:
        assert queue.passed_over is None and queue.level == first.request.priority
        queue.take_first()
        first.state = State.RUNNING
        first.request.usage.prompt_tokens += 1
        came.append(first.request.order)
    assert came == sorted(orders)


def test_memory_follows_the_requests_that_wait() -> None:
    queue = TenantQueue(FairShares())
    for number in range(1_000):
        made = Request(f"r{number}", [1], PARAMS, seed=0)
        made.usage, made.order = queue._shares.tenant(""), (float(number), number)
        queue.arrive(made.sequences[0])
        if number:
            queue.leave(made.sequences[0])
    (line,) = queue._lines.values()
    assert queue.count == 1 and len(line._heap) < 200
