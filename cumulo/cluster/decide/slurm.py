"""Slurm's own scheduling as a policy: its main loop, which starts jobs in the order of priority until one does not
fit, and sched/backfill, which plans a start for each waiting job and starts others where that keeps all plans.
`cumulo simulate cluster --policy slurm` rehearses it.

It simplifies what Slurm simplifies: a plan takes whole nodes even if its job uses a part, plans begin and end
at multiples of bf_resolution, and the ends of running jobs are looked at in groups (`_will_run_test`, Slurm 22.05).
"""

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from cumulo.cluster.decide.decisions import Decision, JobPlacement, Waits
from cumulo.cluster.decide.fit import Places, task_places, tasks_that_fit, why_not
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import FreeCapacity
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
    job: JobRequest
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
        self.ready = sum(1 << number for number in np.flatnonzero(self.free.ready).tolist())
        self.decided: list[Decision] = []
        self.plans: list[_Plan] = []
        self.running: list[_Running] = []  # in the order of their ends
        for one in snapshot.running.values():
            self.add_running(one.request, one.places, one.started_s)

    def add_running(self, job: JobRequest, places: Places, since_s: float) -> None:
        one = _Running(job, places, self.nodes(places), since_s + _limit_s(job))
        insort(self.running, one, key=attrgetter("end_s"))

    def nodes(self, places: Places) -> int:
        return sum(1 << number for number in self.free.numbers(places))

    def start_in_order(self, queue: Sequence[JobRequest]) -> int:
        """Starts jobs until one does not fit; returns how many."""
        for number, job in enumerate(queue):
            places = _first_nodes(job, self.free, self.ready)
            if places is None:
                return number
            self.start(job, places, "first by priority, and it fits")
        return len(queue)

    def start(self, job: JobRequest, places: Places, reason: str) -> None:
        self.free.allocate(job, places)
        self.add_running(job, places, self.now_s)
        self.decided.append(JobPlacement(job.job_id, places, reason))

    def wait(self, job: JobRequest, start_s: float | None = None) -> None:
        reason = why_not(job, self.free)
        if start_s is not None:
            reason += f"; Slurm plans to start it in {start_s - self.now_s:.0f} s"
        self.decided.append(Waits(job.job_id, reason, start_s))

    def start_or_plan(self, job: JobRequest) -> None:
        """Tries the job from now on, and then from the end of each plan that takes nodes from it."""
        from_s, limit_s = self.now_s, _limit_s(job)
        while True:
            later_s = min((one.end_s for one in self.plans if one.end_s > from_s), default=None)
            found = self.earliest(job, self.unplanned(from_s, from_s + limit_s))
            start_s = max(from_s, found[0]) if found else math.inf
            if found is None or (later_s is not None and start_s > later_s):
                if later_s is None:
                    return self.wait(job)
                from_s = later_s
            elif start_s <= self.now_s:
                ahead = f"it ends before {self.plans[0].job_id} can start" if self.plans else "it fits"
                return self.start(job, found[1], ahead)
            else:
                plan = self.plan(job, start_s, found[1])
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

    def plan(self, job: JobRequest, start_s: float, places: Places) -> _Plan:
        slot_s = self.settings.resolution_s
        begin_s = start_s // slot_s * slot_s
        end_s = (start_s + _limit_s(job)) // slot_s * slot_s
        return _Plan(job.job_id, begin_s, max(end_s, begin_s + slot_s), self.nodes(places))

    def takes_planned(self, plan: _Plan) -> bool:
        return any(
            one.nodes & plan.nodes and one.start_s < plan.end_s and one.end_s > plan.start_s
            for one in self.plans
        )

    def earliest(self, job: JobRequest, usable: int) -> tuple[float, Places] | None:
        """When these nodes could take the job, if running jobs end at their limits, and where; None: never."""
        if usable.bit_count() < job.tasks:
            return None
        if (places := _first_nodes(job, self.free, usable)) is not None:
            return self.now_s, places
        then, group_s = self.free.copy(), _GROUP_S
        ends = [one for one in self.running if usable & one.nodes]
        first_s = (ends[0].end_s // _GROUP_S + 1) * _GROUP_S if ends else 0.0
        for number, one in enumerate(ends, 1):
            then.release(one.job, one.places)
            if number < len(ends) and ends[number].end_s <= first_s + group_s:
                continue
            if (places := _first_nodes(job, then, usable)) is not None:
                return max(one.end_s, self.now_s + 1), places  # a job may run on beyond its limit for a while
            while number < len(ends) and ends[number].end_s > first_s + group_s:
                group_s *= 2
        return None


def _limit_s(job: JobRequest) -> float:
    return _NO_LIMIT_S if job.predicted_s is None else job.predicted_s


def _first_nodes(job: JobRequest, free: FreeCapacity, usable: int) -> Places | None:
    """One task on each of the first nodes that can take it."""
    able = [node for node in np.flatnonzero(tasks_that_fit(job, free)).tolist() if usable >> node & 1]
    return (
        task_places(job, free, [(node, 1) for node in able[: job.tasks]]) if len(able) >= job.tasks else None
    )
