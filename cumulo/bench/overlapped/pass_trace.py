"""PassTrace: what each pass of a pipeline's step computes and sends on a rank, in its thread's processor time.
`cumulo bench overlap` measures with it what the simulator then plays."""

import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cumulo.pipeline.decide.actions import Action, Kind
from cumulo.pipeline.simulate.passes import PassCost, PassKey, pass_key
from cumulo.ranks.collectives import meter

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
            self.passes.setdefault(pass_key(action), []).append(here.parts)
            here.parts = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        meter.listener = self._heard
        try:
            yield
        finally:
            meter.listener = None

    def _heard(self, kind: str, sent_bytes: float) -> None:
        parts = getattr(self._here, "parts", None)
        if parts is not None and kind == "all_to_all":
            now_s = time.thread_time()
            parts.append((now_s - self._here.since_s, sent_bytes))
            self._here.since_s = now_s

    def seconds(self) -> float:
        """Of a step, in the middle of those that were traced."""
        steps = zip(*self.passes.values(), strict=True)
        return float(statistics.median(sum(part[0] for parts in step for part in parts) for step in steps))


def pass_costs(traces: Sequence[Mapping[PassKey, list[Parts]]]) -> dict[PassKey, PassCost]:
    """Seconds: the middle of all ranks' and steps' passes of a kind on a chunk. Bytes: each pass's own, of its
    largest sender, for whom the others wait."""
    alike: dict[tuple[Kind, int], list[Parts]] = {}
    sizes: dict[PassKey, list[list[float]]] = {}
    for trace in traces:
        for key, steps in trace.items():
            alike.setdefault((key[0], key[2]), []).extend(steps)
            sizes.setdefault(key, []).append([size for _, size in steps[-1]])
    seconds = {
        name: [statistics.median(part[0] for part in column) for column in zip(*many, strict=True)]
        for name, many in alike.items()
    }
    return {
        key: PassCost(
            tuple(
                zip(seconds[key[0], key[2]], (max(column) for column in zip(*rows, strict=True)), strict=True)
            )
        )
        for key, rows in sizes.items()
    }
