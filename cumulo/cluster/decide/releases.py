"""When GPUs become free, if running jobs end as predicted: the earliest start of a gang that does not fit now,
and whether another job would delay it. Kept up to date node by node: a reservation costs what has changed.
"""

import bisect
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, node_set

_MOST_STEPS = 32  # beyond them all moments are sorted again
_MOST_NEW = 2048  # ends of jobs that came or went since all were put in order
_NOW, _NEVER = float("-inf"), float("inf")
_End = tuple[float, str]  # when a job ends, and its name
_Kind = tuple[int, tuple[str, ...]]  # GPUs per task, accepted devices


@dataclass(slots=True)
class Start:
    """The earliest start of `tasks` tasks: `at_s` is the first moment with so many slots."""

    tasks: int
    at_s: float
    before: int  # slots that are free before that moment
    by_then: int  # and at that moment
    asked: int = 0


@dataclass(slots=True)
class _LateNodes:
    """Those that have fewer GPUs than asked for at a moment, as a set."""

    nodes: int
    asked: int = 0


class Releases:
    """The moment at which each GPU is free. Policies try on it and take back what they tried. Kept up to date from
    `begin` on, because many policies never ask."""

    def __init__(self, free: FreeCapacity, running: Mapping[str, RunningJob]) -> None:
        self.free = free
        self._before: Mapping[str, RunningJob] | None = running  # what runs when it begins
        self.gpu_end_s: list[list[float]] = [[_NOW] * node.gpus for node in free.nodes]
        # Of the jobs whose end is predicted: the ends and names in order, and what was added and removed since.
        self._by_end: list[_End] = []
        self._coming: set[_End] = set()
        self._going: set[_End] = set()
        self._places: dict[str, Sequence[TaskPlace]] = {}  # theirs
        self._shares: dict[tuple[int, int], dict[str, float]] = {}  # ends of the shares of a GPU
        self._ends: np.ndarray | None = None  # [nodes, GPUs]: the same moments, in order on each node
        self._starts: dict[_Kind, dict[int, Start]] = {}
        self._changed: set[int] = (
            set()
        )  # nodes whose rows of `_ends` are old: what is tried is often taken back
        self._rows: list[list[float]] = []  # the same as lists
        self._late: dict[tuple[int, float], _LateNodes] = {}  # by GPUs and moment
        self._round = 0

    def begin(self) -> "Releases":
        """Policies that reserve starts call it in every decision: early, while few jobs run, it costs little."""
        if self._before is not None:
            before, self._before = self._before, None
            for job in before.values():
                self.add(job.request, job.places, job.expected_end_s)
        return self

    def add(self, job: JobRequest, places: Sequence[TaskPlace], end_s: float | None) -> None:
        if self._before is not None:
            return
        if end_s is not None:
            end = end_s, job.job_id
            (self._going.remove if end in self._going else self._coming.add)(end)
            self._places[job.job_id] = places
            self._limit_new()
        self._move(job, places, _NEVER if end_s is None else end_s)

    def remove(self, job: JobRequest, places: Sequence[TaskPlace], end_s: float | None) -> None:
        """Takes back `take` with the same values."""
        if self._before is not None:
            return
        if end_s is not None:
            end = end_s, job.job_id
            (self._coming.remove if end in self._coming else self._going.add)(end)
            del self._places[job.job_id]
            self._limit_new()
        self._move(job, places, None)

    def _limit_new(self) -> None:
        if len(self._coming) + len(self._going) > _MOST_NEW:
            self._put_in_order()  # else one decision would have to do it for a whole cluster

    @property
    def by_end(self) -> Sequence[_End]:
        """When jobs end, and their names, in order. Put in order when somebody asks: what is tried is often taken
        back before."""
        self._put_in_order()
        return self._by_end

    def _put_in_order(self) -> None:
        by_end, coming, going = self._by_end, self._coming, self._going
        if 32 * (len(coming) + len(going)) > len(by_end):  # more of them are faster sorted than one by one
            if going:
                by_end[:] = [end for end in by_end if end not in going]
            if coming:
                by_end += coming
                by_end.sort()
        else:
            for end in coming:
                bisect.insort(by_end, end)
            for end in going:
                del by_end[bisect.bisect_left(by_end, end)]
        coming.clear()
        going.clear()

    def _move(self, job: JobRequest, places: Sequence[TaskPlace], end_s: float | None) -> None:
        index, whole = self.free.index, job.gpu_milli == WHOLE_GPU
        free_s = _NOW if end_s is None else end_s
        for place in places:
            if not place.gpus:
                continue
            node = index[place.node]
            ends = self.gpu_end_s[node]
            self._changed.add(node)
            if whole:
                for gpu in place.gpus:
                    ends[gpu] = free_s
                continue
            for gpu in place.gpus:
                shares = self._shares.setdefault((node, gpu), {})
                if end_s is None:
                    shares.pop(job.job_id, None)
                else:
                    shares[job.job_id] = end_s
                ends[gpu] = max(shares.values(), default=_NOW)

    def settle(self) -> np.ndarray:
        """Brings `_ends` and what is counted of the known starts up to date."""
        if self._ends is None:
            self._ends = self._all_ends()
            self._rows = self._ends.tolist()
            self._changed.clear()
        if not self._changed:
            return self._ends
        kinds = [(kind, starts.values()) for kind, starts in self._starts.items() if starts]
        width = self._ends.shape[1]
        for node in self._changed:
            after = sorted(self.gpu_end_s[node]) if self.free.ready[node] else []
            after += [_NEVER] * (width - len(after))
            before = self._rows[node]
            if after == before:
                continue
            self._ends[node] = self._rows[node] = after
            for (gpus, at_s), late in self._late.items():
                if (after[gpus - 1] > at_s) != (before[gpus - 1] > at_s):
                    late.nodes ^= 1 << node
            for (gpus, devices), starts in kinds:
                if devices and self.free.nodes[node].device not in devices:
                    continue
                now, then = after[gpus - 1 :: gpus], before[gpus - 1 :: gpus]
                for start in starts:
                    at_s = start.at_s
                    start.before += bisect.bisect_left(now, at_s) - bisect.bisect_left(then, at_s)
                    start.by_then += bisect.bisect(now, at_s) - bisect.bisect(then, at_s)
        self._changed.clear()
        return self._ends

    def _all_ends(self) -> np.ndarray:
        free = self.free
        present = np.arange(free.gpu_milli.shape[1]) < free.gpus[:, None]
        ends = np.full(present.shape, _NEVER)
        ends[present] = np.fromiter(itertools.chain.from_iterable(self.gpu_end_s), np.float64)
        ends[~free.ready] = _NEVER
        ends.sort(axis=1)
        return ends

    def _slots(self, kind: _Kind) -> np.ndarray:
        """[nodes, tasks]: when a node has room for so many tasks; of the nodes with an accepted device."""
        gpus, devices = kind
        ends = self.settle()
        return (ends[self.free.device_mask(devices)] if devices else ends)[:, gpus - 1 :: gpus]

    def set_health(self, node: int) -> None:
        """`free` says whether the node is ready."""
        self._changed.add(node)

    def earliest(self, job: JobRequest) -> Start | None:
        """Of a job that asks for whole GPUs only; None: it is not known to fit ever."""
        self.settle()
        kind = (job.gpus_per_task, job.devices)
        if kind[0] > self.free.gpu_milli.shape[1]:
            return None
        starts = self._starts.setdefault(kind, {})
        known = starts.get(job.tasks)
        if known is None or not self._followed(known, kind):
            slots = self._slots(kind)
            if job.tasks > slots.size:
                return None
            at_s = float(
                slots.min()
                if job.tasks == 1
                else np.partition(slots, job.tasks - 1, axis=None)[job.tasks - 1]
            )
            before, by_then = int(np.count_nonzero(slots < at_s)), int(np.count_nonzero(slots <= at_s))
            known = starts[job.tasks] = Start(job.tasks, at_s, before, by_then)
        known.asked = self._round
        return None if known.at_s == _NEVER else known

    def _followed(self, start: Start, kind: _Kind) -> bool:
        """Moves a start from end to end until it is the earliest again; whether it did within a few steps."""
        for _ in range(_MOST_STEPS):
            if start.by_then < start.tasks:
                by_end = self.by_end
                at = bisect.bisect(by_end, start.at_s, key=operator.itemgetter(0))
                if at == len(by_end):
                    return False
                start.at_s, start.before = by_end[at][0], start.by_then
                start.by_then += self._slots_at(start.at_s, kind)
            elif start.before >= start.tasks:
                by_end = self.by_end
                at = bisect.bisect_left(by_end, start.at_s, key=operator.itemgetter(0)) - 1
                if at < 0:
                    return False
                start.at_s, start.by_then = by_end[at][0], start.before
                start.before -= self._slots_at(start.at_s, kind)
            else:
                return True
        return False

    def _slots_at(self, at_s: float, kind: _Kind) -> int:
        """Slots that become free at the moment at which a job ends: they are on nodes of such jobs."""
        (gpus, devices), nodes, by_end = kind, set[int](), self.by_end
        at = bisect.bisect_left(by_end, at_s, key=operator.itemgetter(0))
        while at < len(by_end) and by_end[at][0] == at_s:
            nodes.update([self.free.index[place.node] for place in self._places[by_end[at][1]]])
            at += 1
        found = 0
        for node in nodes:
            if not devices or self.free.nodes[node].device in devices:
                found += self._rows[node][gpus - 1 :: gpus].count(at_s)
        return found

    def loses_more(self, spare: int, places: Iterable[TaskPlace], job: JobRequest, at_s: float) -> bool:
        """Whether more than `spare` tasks of `job` fewer fit at a moment if another job still has these places
        then."""
        self.settle()
        left: dict[int, int] = {}  # GPUs of each node that are free at that moment
        lost, each = 0, job.gpus_per_task
        for place in places:
            node = self.free.index[place.node]
            if job.devices and self.free.nodes[node].device not in job.devices:
                continue
            before = left.get(node)
            if before is None:
                before = bisect.bisect(self._rows[node], at_s)
            ends = self.gpu_end_s[node]
            after = before - sum([ends[gpu] <= at_s for gpu in place.gpus])
            left[node] = after
            lost += before // each - after // each
            if lost > spare:
                return True
        return lost > spare

    def spare(self, start: Start) -> int:
        """Slots more than it needs at the moment of that start."""
        self.settle()
        return start.by_then - start.tasks

    def of_no_use(self, job: JobRequest, at_s: float) -> int:
        """The set of ready nodes that cannot take a task of this job at that moment anyway."""
        ends, key = self.settle(), (job.gpus_per_task, at_s)
        late = self._late.get(key)
        if late is None:
            late = self._late[key] = _LateNodes(node_set(ends[:, key[0] - 1] > at_s))
        late.asked = self._round
        if not job.devices:
            return self.free.ready_set & late.nodes
        return self.free.ready_set & ~(self.free.usable_set(job.devices) & ~late.nodes)

    def forget(self) -> None:
        """Drops what nobody asked for since the last call."""
        for kind, starts in list(self._starts.items()):
            for tasks in [tasks for tasks, start in starts.items() if start.asked < self._round]:
                del starts[tasks]
            if not starts:
                del self._starts[kind]
        for key in [key for key, late in self._late.items() if late.asked < self._round]:
            del self._late[key]
        self._round += 1
