"""Sides that do the same work in turns, so that whatever slows the machine slows all of them alike. The benchmarks
that compare use it."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Tell = Callable[..., None]  # what is being measured, and perhaps how much of how much is done


def take_turns(
    sides: Mapping[str, Callable[[int], T]],
    rounds: int,
    tell: Tell,
    warm_ups: int = 1,
    what: str = "",
    rest_s: float = 0.0,
) -> dict[str, list[T]]:
    """What each side gives in each round after the warm-ups. A side is called with the number of the round.

    Every other round goes backwards, so that nobody always follows the same neighbour. `rest_s`: lets the threads
    of the side before go to sleep."""
    given: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(warm_ups + rounds):
        tell(
            f"{what}round {number - warm_ups + 1} of {rounds}" if number >= warm_ups else f"{what}warming up"
        )
        for name in sides if number % 2 else reversed([*sides]):
            time.sleep(rest_s)
            result = sides[name](number)
            if number >= warm_ups:
                given[name].append(result)
    return given


def timed(work: Callable[[], object]) -> Callable[[int], float]:
    """A side that gives the seconds that its work takes."""

    def side(number: int) -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    return side


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(own / other for own, other in zip(ours, theirs, strict=True))


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g} in {len(values)} rounds"
