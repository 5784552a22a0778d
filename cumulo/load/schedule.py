"""What will be sent and when: a `Schedule` of conversations, planned from a workload and a seed. Pure.

`plan` makes one for a level of load, `trace.plan_trace` from a recorded trace; the player sends it.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cumulo.errors import CumuloError
from cumulo.load.arrivals import Arrivals
from cumulo.load.lengths import Constant, Lengths


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One request: its new text and the answer wanted. Earlier turns come along as history."""

    input_tokens: int
    output_tokens: int
    think_s: float = 0.0  # pause after the previous answer
    not_before_s: float | None = None  # a trace's own time for this turn
    blocks: tuple[int, ...] = ()  # names of equal pieces of prompts, where a trace tells


@dataclass(frozen=True, slots=True)
class PlannedConversation:
    """Requests that follow one another. `start_s` None: as soon as a place in the closed loop is free."""

    number: int
    turns: tuple[PlannedTurn, ...]
    seed: str
    start_s: float | None = None
    prefix: str | None = None  # the seed of texts that others share
    prefix_tokens: int = 0
    measured: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """A level of load. With `concurrency` the loop is closed; otherwise each conversation starts on time."""

    conversations: Iterable[PlannedConversation]
    concurrency: int | None = None
    stop_s: float | None = None  # start no conversation after this
    requests: int | None = None  # how many turns it has in all, where that is known


@dataclass(frozen=True, slots=True)
class Workload:
    """The kind of requests, whatever the rate: lengths, shared prefixes, turns."""

    input_tokens: Lengths = field(default_factory=lambda: Constant(128))
    output_tokens: Lengths = field(default_factory=lambda: Constant(64))
    turns: Lengths = field(default_factory=lambda: Constant(1))
    think_s: float = 0.0  # mean of an exponential pause between turns
    prefix_tokens: int = 0
    prefixes: int = 1  # how many different shared prefixes there are

    def conversation(
        self, number: int, seed: str, start_s: float | None, measured: bool
    ) -> PlannedConversation:
        """Number `number` of the seed's endless sequence; the same for every rate and every machine."""
        rng = random.Random(f"{seed}/{number}")
        turns = tuple(
            PlannedTurn(
                self.input_tokens.draw(rng),
                self.output_tokens.draw(rng),
                rng.expovariate(1 / self.think_s) if position and self.think_s else 0.0,
            )
            for position in range(self.turns.draw(rng))
        )
        prefix = f"{seed}/prefix/{rng.randrange(self.prefixes)}" if self.prefix_tokens else None
        return PlannedConversation(
            number, turns, f"{seed}/{number}", start_s, prefix, self.prefix_tokens if prefix else 0, measured
        )


def plan(
    workload: Workload,
    load: Arrivals | int,
    seed: str,
    conversations: int | None = None,
    duration_s: float | None = None,
    warmup: int = 0,
) -> Schedule:
    """The schedule of one level: `load` is a concurrency or an arrival process.

    It ends after so many conversations, after a duration, or whichever comes first. The first `warmup`
    ones come on top, are sent like all others and left out of the figures.
    """
    if conversations is None and duration_s is None:
        raise CumuloError("a run needs an end: say how many requests or for how long")
    total = None if conversations is None else conversations + warmup
    if isinstance(load, int):
        endless = _closed(workload, seed, total, warmup)
        if total is None:
            return Schedule(endless, load, duration_s)
        planned = tuple(endless)
        return Schedule(planned, load, duration_s, count_requests(planned))
    planned = tuple(_open(workload, load, seed, total, duration_s, warmup))
    return Schedule(planned, None, duration_s, count_requests(planned))


def count_requests(conversations: Iterable[PlannedConversation]) -> int:
    return sum(len(conversation.turns) for conversation in conversations)


def _closed(workload: Workload, seed: str, total: int | None, warmup: int) -> Iterator[PlannedConversation]:
    number = 0
    while total is None or number < total:
        yield workload.conversation(number, seed, None, measured=number >= warmup)
        number += 1


def _open(
    workload: Workload,
    arrivals: Arrivals,
    seed: str,
    total: int | None,
    duration_s: float | None,
    warmup: int,
) -> Iterator[PlannedConversation]:
    for number, start_s in enumerate(arrivals.times_s(random.Random(f"{seed}/arrivals"))):
        if (total is not None and number >= total) or (duration_s is not None and start_s >= duration_s):
            return
        yield workload.conversation(number, seed, start_s, measured=number >= warmup)
