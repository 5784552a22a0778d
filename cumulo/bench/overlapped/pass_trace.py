"""PassTrace: what each pass of a pipeline's step computes and sends on a rank, in its thread's processor time.
`cumulo bench overlap` measures with it what the simulator then plays."""

import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cumulo.pipeline.decide.actions import Action, Kind
from cumulo.pipeline.simulate.passes import PassCost
from cumulo.ranks.collective_meter import meter

PassKey = tuple[Kind, int, int, int]  # kind, micro-batch, chunk, direction
Parts = list[tuple[float, float]]


@dataclass(slots=True)
class PassTrace:
    """Of one rank. It hears of exchanges from the meter."""

    passes: dict[PassKey, list[Parts]] = field(default_factory=dict)  # of each step
    _here: threading.local = field(default_factory=threading.local)

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        if not action.kind.is_compute:
            yield
            return
        here = self._here
        here.parts, here.since_s = [], time.thread_time()
        try:
            yield
        finally:
            here.parts.append((time.thread_time() - here.since_s, 0.0))
            key = (action.kind, action.micro_batch, action.chunk, action.direction)
            self.passes.setdefault(key, []).append(here.parts)
            here.parts = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        meter.listener = self._heard
        try:
            yield
        finally:
            meter.listener = None

    def _heard(self, kind: str, size_bytes: int, ranks: int) -> None:
        parts = getattr(self._here, "parts", None)
        if parts is not None and kind == "all_to_all":
            now_s = time.thread_time()
            parts.append((now_s - self._here.since_s, size_bytes * (ranks - 1) / ranks))
            self._here.since_s = now_s

    def seconds(self) -> float:
        """Of a step, in the middle of those that were traced."""
        steps = zip(*self.passes.values(), strict=True)
        return float(statistics.median(sum(part[0] for parts in step for part in parts) for step in steps))


def pass_costs(traces: Sequence[Mapping[PassKey, list[Parts]]]) -> dict[tuple[Kind, int], PassCost]:
    """The middle of the ranks' and steps' times; an exchange takes as long as its largest sender needs."""
    found: dict[tuple[Kind, int], list[Parts]] = {}
    sizes: dict[PassKey, list[list[float]]] = {}
    for trace in traces:
        for key, steps in trace.items():
            found.setdefault((key[0], key[2]), []).extend(steps)
            sizes.setdefault(key, []).append([size for _, size in steps[-1]])
    largest: dict[tuple[Kind, int], list[list[float]]] = {}
    for key, rows in sizes.items():
        largest.setdefault((key[0], key[2]), []).append([max(column) for column in zip(*rows, strict=True)])
    costs = {}
    for name, many in found.items():
        times = [statistics.median(part[0] for part in column) for column in zip(*many, strict=True)]
        bytes_ = [statistics.mean(column) for column in zip(*largest[name], strict=True)]
        costs[name] = PassCost(tuple(zip(times, bytes_, strict=True)))
    return costs
