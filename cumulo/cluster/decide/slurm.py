"""Slurm's own scheduling as a policy: its main loop, which starts jobs in the order of priority until one does not
fit, and sched/backfill, which plans a start for each waiting job and starts others where that keeps all plans.
`cumulo simulate cluster --policy slurm` rehearses it.

It simplifies what Slurm simplifies: a plan takes whole nodes even if its job uses a part, plans begin and end
at multiples of bf_resolution, and the ends of running jobs are looked at in groups (`_will_run_test`, Slurm 22.05).
Gangs have one task on each of their nodes, with whole GPUs.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from cumulo.cluster.decide.decisions import Decision, JobPlacement, Waits
from cumulo.cluster.decide.fit import Places, task_places, tasks_that_fit, why_not
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import Flags, Ints
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_GROUP_S = 30.0  # ends of running jobs within this time are one group; each later group is twice as long
_NO_LIMIT_S = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class SlurmScheduling:
    """What `scontrol show config` says about scheduling."""

    backfill: bool = True  # SchedulerType
    interval_s: float = 30.0  # bf_interval: between two looks of backfill
    window_s: float = 86400.0  # bf_window: no start is planned later
    resolution_s: float = 60.0  # bf_resolution: plans begin and end at multiples of this
    most_tested: int = 500  # bf_max_job_test: waiting jobs that backfill looks at
    depth: int = 100  # default_queue_depth: waiting jobs that the main loop looks at
    delay_s: float = 3.0  # batch_sched_delay: between two looks of the main loop
    age_weight: float = 0.0  # PriorityWeightAge: what a job gains by waiting for max_age_s
    max_age_s: float = 7 * 86400.0  # PriorityMaxAge
    phase_s: float = 0.0  # of the moments at which backfill looks; no configuration tells it

    def priority(self, job: JobRequest, now_s: float) -> float:
        """`job.priority` is the part that does not change while the job waits."""
        return job.priority + self.age_weight * min(1.0, (now_s - job.arrival_s) / self.max_age_s)

    def backfill_looks(self, now_s: float) -> bool:
        return self.backfill and abs(math.remainder(now_s - self.phase_s, self.interval_s)) < 1e-6


@dataclass(frozen=True, slots=True)
class _Plan:
    """Nodes that are kept for a job that waits; sets of nodes are bits of an integer here."""

    job_id: str
    start_s: float
    end_s: float
    nodes: int


@dataclass(frozen=True, slots=True)
class _Running:
    places: Places
    nodes: int
    end_s: float  # at its time limit


def slurm_policy(settings: SlurmScheduling) -> Policy:
    def policy(snapshot: Snapshot) -> list[Decision]:
        now_s = snapshot.now_s
        queue = sorted(snapshot.waiting, key=lambda job: (-settings.priority(job, now_s), job.arrival_s))
        look = _Look(snapshot, settings)
        started = look.start_in_order(queue[: settings.depth])
        if settings.backfill_looks(now_s):
            for job in queue[started:][: settings.most_tested]:
                look.start_or_plan(job)
        elif started < len(queue):
            look.wait(queue[started])
        return look.decided

    return policy


class _Look:
    """One decision while it is made."""

    def __init__(self, snapshot: Snapshot, settings: SlurmScheduling) -> None:
        self.now_s, self.settings, self.free = snapshot.now_s, settings, snapshot.free.copy()
        self.ready = _bits(np.flatnonzero(self.free.ready).tolist())
        self.decided: list[Decision] = []
        self.plans: list[_Plan] = []
        self.running: list[_Running] = []  # in the order of their ends
        self.later: Ints | None = None  # [ends of running jobs, nodes]: GPUs that are free then
        for one in snapshot.running.values():
            self.add_running(one.request, one.places, one.started_s)

    def add_running(self, job: JobRequest, places: Places, since_s: float) -> None:
        one = _Running(places, _bits(self.free.numbers(places)), since_s + _limit_s(job))
        insort(self.running, one, key=attrgetter("end_s"))

    def start_in_order(self, queue: Sequence[JobRequest]) -> int:
        """Starts jobs until one does not fit; returns how many."""
        for number, job in enumerate(queue):
            able = np.flatnonzero(tasks_that_fit(job, self.free))[: job.tasks].tolist()
            if len(able) < job.tasks:
                return number
            self.start(job, able, "first by priority, and it fits")
        return len(queue)

    def start(self, job: JobRequest, nodes: list[int], reason: str) -> None:
        """With one task on each of these nodes."""
        places = task_places(job, self.free, [(node, 1) for node in nodes])
        self.free.allocate(job, places)
        self.add_running(job, places, self.now_s)
        self.later = None
        self.decided.append(JobPlacement(job.job_id, places, reason))

    def wait(self, job: JobRequest, start_s: float | None = None) -> None:
        reason = why_not(job, self.free)
        if start_s is not None:
            reason += f"; Slurm plans to start it in {start_s - self.now_s:.0f} s"
        self.decided.append(Waits(job.job_id, reason, start_s))

    def start_or_plan(self, job: JobRequest) -> None:
        """Tries the job from now on, and then from the end of each plan that takes nodes from it."""
        from_s, limit_s, able_from_s = self.now_s, _limit_s(job), self.able_from(job)
        while True:
            later_s = min((one.end_s for one in self.plans if one.end_s > from_s), default=math.inf)
            usable = self.unplanned(from_s, from_s + limit_s)
            start_s, nodes = self.earliest(job.tasks, able_from_s, usable, later_s)
            start_s = max(start_s, from_s)
            if start_s == math.inf and later_s == math.inf:
                return self.wait(job)
            if start_s > later_s:
                from_s = later_s
            elif start_s <= self.now_s:
                ahead = f"it ends before {self.plans[0].job_id} can start" if self.plans else "it fits"
                return self.start(job, nodes, ahead)
            else:
                plan = self.plan(job, start_s, nodes)
                if not self.takes_planned(plan):
                    if start_s <= self.now_s + self.settings.window_s:
                        self.plans.append(plan)
                    return self.wait(job, start_s)
                from_s = start_s  # it runs into a plan that the search, which began earlier, did not see

    def unplanned(self, from_s: float, until_s: float) -> int:
        """The nodes that no plan takes in this time."""
        found = self.ready
        for one in self.plans:
            if one.start_s <= until_s and one.end_s > from_s:
                found &= ~one.nodes
        return found

    def plan(self, job: JobRequest, start_s: float, nodes: list[int]) -> _Plan:
        slot_s = self.settings.resolution_s
        begin_s = start_s // slot_s * slot_s
        end_s = (start_s + _limit_s(job)) // slot_s * slot_s
        return _Plan(job.job_id, begin_s, max(end_s, begin_s + slot_s), _bits(nodes))

    def takes_planned(self, plan: _Plan) -> bool:
        return any(
            one.nodes & plan.nodes and one.start_s < plan.end_s and one.end_s > plan.start_s
            for one in self.plans
        )

    def earliest(
        self, tasks: int, able_from_s: Ints, usable: int, wanted_s: float
    ) -> tuple[float, list[int]]:
        """When so many of these nodes can take a task, and which; infinity: never, or later than `wanted_s`."""
        if usable.bit_count() < tasks:
            return math.inf, []
        from_s = np.where(_flags(usable, len(able_from_s)), able_from_s, math.inf)
        start_s = float(np.partition(from_s, tasks - 1)[tasks - 1])
        if start_s > wanted_s or start_s == math.inf:
            return math.inf, []
        if start_s > -math.inf:
            start_s = self.end_of_group(start_s, usable)
        nodes: list[int] = np.flatnonzero(from_s <= start_s)[:tasks].tolist()
        # A job that is beyond its limit ends soon.
        return (self.now_s if start_s == -math.inf else max(start_s, self.now_s + 1)), nodes

    def able_from(self, job: JobRequest) -> Ints:
        """When each node can take a task, if running jobs end at their limits; -infinity: now."""
        if self.later is None:
            self.later = np.zeros((1 + len(self.running), len(self.free.nodes)), dtype=np.int32)
            self.later[0] = self.free.whole
            for number, one in enumerate(self.running, 1):
                for place in one.places:
                    self.later[number, self.free.index[place.node]] += len(place.gpus)
            np.cumsum(self.later, axis=0, out=self.later)
        able = self.later >= job.gpus_per_task
        ends_s = np.array([-math.inf, *(one.end_s for one in self.running)])
        return np.where(able[-1], ends_s[able.argmax(axis=0)], math.inf)

    def end_of_group(self, end_s: float, usable: int) -> float:
        """Slurm frees the nodes of a group of running jobs together, and then looks whether the job fits."""
        ends = [one.end_s for one in self.running if one.nodes & usable]
        first_s, group_s = (ends[0] // _GROUP_S + 1) * _GROUP_S, _GROUP_S
        while first_s + group_s < end_s:
            group_s *= 2
        return ends[bisect_right(ends, first_s + group_s) - 1]


def _limit_s(job: JobRequest) -> float:
    return _NO_LIMIT_S if job.predicted_s is None else job.predicted_s


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


def _flags(bits: int, count: int) -> Flags:
    found = np.frombuffer(bits.to_bytes(count // 8 + 1, "little"), dtype=np.uint8)
    return np.unpackbits(found, count=count, bitorder="little").astype(np.bool_)
