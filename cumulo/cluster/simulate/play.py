"""A trace played under a policy, in virtual time: events from a heap, one decision after each moment with events.

run = play(nodes, jobs, policy)
run.mean_jct_s, run.utilisation
"""

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from cumulo.cluster.decide.check import violations
from cumulo.cluster.decide.decisions import Cordon, Decision, Eviction, JobPlacement, Resize, Waits
from cumulo.cluster.decide.fit import slots
from cumulo.cluster.decide.jobs import WHOLE_GPU, GangShape, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity
from cumulo.cluster.decide.policies import NamedPolicy
from cumulo.cluster.decide.snapshot import Policy, Snapshot, TenantQuota
from cumulo.cluster.simulate.job_speed import JobSpeed, TraceJob
from cumulo.cluster.simulate.outcome import ClusterRun, JobOutcome, Segment
from cumulo.cluster.simulate.synthetic import FailureRates, failure_times
from cumulo.errors import CumuloError

ROUND_S = 60.0  # between two decisions of policies that resize or preempt running jobs all the time
_LARGE_ROUND_S, _MANY_JOBS = 30.0, 10_000  # and of all others, where jobs are many; Slurm's bf_interval

EventKind = Literal["arrive", "advance", "fail", "repair", "decide"]
# When, in which order of those of the moment, what, the job or node, and a number for whoever handles it. Arrivals
# are pushed first, in the order of the trace.
Event = tuple[float, int, EventKind, str, int]


class BrokenPolicy(CumuloError):
    """A policy decided what cannot be carried out."""


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    interval_s: float = 0.0  # decide at multiples of this; 0: whenever something happens
    # Instead: once something happened, at the next multiple of each first number, plus the second one.
    decide_after: tuple[tuple[float, float], ...] = ()
    quotas: tuple[TenantQuota, ...] = ()
    failures: FailureRates | None = None
    checkpoint_every_s: float = 1800.0  # a failure loses what was done since
    seed: int = 0
    check: bool = True  # every decision is held against the rules
    keep_log: bool = False
    always_decide: bool = False  # also when nothing waits: elastic policies resize then
    told: Callable[[int, int], None] | None = None  # jobs finished, jobs


def usual_interval_s(policy: NamedPolicy, jobs: int) -> float:
    """Seconds between two decisions where nobody says so; 0: at every event. Where jobs are many, policies decide
    in rounds, as the systems they follow do."""
    if jobs < _MANY_JOBS:
        return 0.0
    return ROUND_S if policy.in_rounds else _LARGE_ROUND_S


@dataclass(slots=True)
class _Live:
    """One job while it is in the system."""

    request: JobRequest
    work: float
    number: int
    done: float = 0.0
    saved: float = 0.0  # what its last checkpoint holds
    places: tuple[TaskPlace, ...] = ()
    gpus: float = 0.0  # of these places
    rate: float = 0.0
    changes_at: float = float("inf")  # work done, from when the rate is another
    since_s: float = 0.0  # `done` is of this moment
    run_began_s: float = 0.0
    event: int = 0  # only the newest event of a job counts
    first_start_s: float | None = None
    restarts: int = 0
    resizes: int = 0
    gpu_s: float = 0.0
    why: str = ""


@dataclass
class _Player:
    trace: Sequence[TraceJob]
    policy: Policy
    speed: JobSpeed
    options: PlayOptions
    free: FreeCapacity
    now_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    pushed: int = 0
    planned: set[float] = field(default_factory=set)  # moments of `decide_after`
    live: dict[str, _Live] = field(default_factory=dict)
    waiting: dict[str, _Live] = field(default_factory=dict)
    running: dict[str, RunningJob] = field(default_factory=dict)
    used_gpus: float = 0.0
    fitting: dict[GangShape, int] = field(default_factory=dict)  # tasks that the empty cluster can hold
    in_vain: int = 0  # decisions since something happened that started nothing although jobs wait

    def __post_init__(self) -> None:
        self.run = ClusterRun(tuple(self.free.nodes))
        self.quotas = MappingProxyType({quota.tenant: quota for quota in self.options.quotas})
        self.empty = FreeCapacity([replace(node, health="ready") for node in self.free.nodes])
        for number, job in enumerate(self.trace):
            self.push(job.request.arrival_s, "arrive", job.request.job_id, number)
        if self.options.failures is not None:
            last = max(job.request.arrival_s for job in self.trace) + 10 * max(job.work for job in self.trace)
            nodes = self.free.nodes
            for at_s, node in failure_times(self.options.failures, len(nodes), last, self.options.seed):
                self.push(at_s, "fail", nodes[node].name)
        if self.options.interval_s:
            self.push(self.options.interval_s, "decide")

    # -- events

    def play(self) -> ClusterRun:
        told, finished = self.options.told, 0
        while self.events and len(self.run.outcomes) + len(self.run.impossible) < len(self.trace):
            self.run.used_gpu_s += self.used_gpus * (self.events[0][0] - self.now_s)
            self.now_s = self.events[0][0]
            if self.handle_moment() and (self.waiting or self.options.always_decide):
                self.decide()
            if len(self.run.outcomes) != finished:
                finished = len(self.run.outcomes)
                if told is not None:
                    told(finished, len(self.trace))
            if self.waiting and self.stuck():
                break
        self.run.end_s, self.run.unfinished = self.now_s, self.queue()
        return self.run

    def handle_moment(self) -> bool:
        """All events of this moment; whether a decision is due after them."""
        due, happened = not (self.options.interval_s or self.options.decide_after), False
        while self.events and self.events[0][0] == self.now_s:
            _, _, kind, name, number = heapq.heappop(self.events)
            if kind == "decide":
                due = True
                if self.options.interval_s:
                    self.push(self.now_s + self.options.interval_s, "decide")
                continue
            self.in_vain, happened = 0, True
            if kind == "arrive":
                self.arrive(number)
            elif kind == "advance":
                self.advance_to_event(name, number)
            elif kind == "fail":
                self.fail(name)
            elif kind == "repair":
                node = self.free.index[name]
                self.free.replace_node(node, replace(self.free.nodes[node], health="ready"))
        for every_s, phase_s in self.options.decide_after if happened else ():
            at_s = math.ceil((self.now_s - phase_s) / every_s) * every_s + phase_s
            if at_s not in self.planned:
                self.planned.add(at_s)
                self.push(at_s, "decide")
        return due

    def push(self, at_s: float, kind: EventKind, name: str = "", number: int = 0) -> None:
        self.pushed += 1
        heapq.heappush(self.events, (at_s, self.pushed, kind, name, number))

    def stuck(self) -> bool:
        """Nothing runs, something waits, and only failures are to come: it will wait for ever."""
        if self.running or (self.options.interval_s and self.in_vain <= 2):
            return False
        comes = ("arrive", "repair", "decide") if self.options.decide_after else ("arrive", "repair")
        return not any(event[2] in comes for event in self.events)

    # -- jobs

    def arrive(self, number: int) -> None:
        """A job that an empty and whole cluster could not run is left out: nobody must wait for it."""
        job = self.trace[number].request
        if job.shape not in self.fitting:
            self.fitting[job.shape] = slots(job, self.empty)
        if self.fitting[job.shape] < (job.min_tasks or job.tasks):
            self.run.impossible.append(job)
            return
        self.live[job.job_id] = self.waiting[job.job_id] = _Live(job, self.trace[number].work, number)

    def queue(self) -> list[JobRequest]:
        """The jobs that wait, in the order of arrival."""
        ordered = sorted(self.waiting.values(), key=lambda one: (one.request.arrival_s, one.number))
        return [one.request for one in ordered]

    def advance(self, one: _Live) -> None:
        """Work done until now, at the rate it had."""
        ran_s = self.now_s - one.since_s
        if ran_s > 0:
            one.gpu_s += one.gpus * ran_s
            one.done = min(one.work, one.done + one.rate * ran_s)
            one.since_s = self.now_s

    def advance_to_event(self, name: str, number: int) -> None:
        """A job ends, or its rate changes."""
        one = self.live.get(name)
        if one is None or one.event != number or not one.places:
            return
        self.advance(one)
        # This is when it gets there. Late in a long trace the clock's last digit is worth more than what is
        # left: counted from the clock alone, it would come closer for ever and never end.
        one.done = max(one.done, min(one.work, one.changes_at))
        if one.done >= one.work:
            self.finish(one)
        else:
            self.go_on(one)

    def go_on(self, one: _Live) -> None:
        """The next event of this job: its end, or when its rate changes."""
        one.rate, one.changes_at = self.speed.rate(one.request, one.places, one.done)
        one.event += 1
        if one.rate > 0:
            until = min(one.work, one.changes_at) - one.done
            began_s = max(self.now_s, one.since_s)
            self.push(began_s + until / one.rate, "advance", one.request.job_id, one.event)

    def start(self, one: _Live, places: tuple[TaskPlace, ...], pause_s: float) -> None:
        request = one.request
        self.free.allocate(request, places)
        one.places, one.gpus = places, len(places) * request.milli_per_task / WHOLE_GPU
        one.run_began_s = self.now_s
        one.since_s = self.now_s + pause_s
        if one.first_start_s is None:
            one.first_start_s = self.now_s
        expected = None if request.predicted_s is None else one.since_s + request.predicted_s
        self.running[request.job_id] = RunningJob(
            request, places, self.now_s, expected, one.restarts + one.resizes
        )
        self.used_gpus += one.gpus
        self.go_on(one)
        self.speed.started(request, places)

    def leave(self, one: _Live) -> RunningJob:
        """Frees its places."""
        self.advance(one)
        request = one.request
        self.run.segments.append(Segment(request.job_id, one.run_began_s, self.now_s, one.places))
        self.free.release(request, one.places)
        self.speed.left(request, one.places)
        self.used_gpus -= one.gpus
        one.places, one.event = (), one.event + 1
        return self.running.pop(request.job_id)

    def stop(self, one: _Live) -> None:
        """Frees its places, before it waits again: what it was told about its past is kept in its request."""
        run = self.leave(one)
        request, left = one.request, None
        if request.predicted_s is not None:
            ran_s = max(0.0, self.now_s - run.started_s - request.startup_s)
            left = max(request.predicted_s - ran_s, 0.05 * request.predicted_s)
        one.request = request.after_run(run.attained_gpu_s(self.now_s), left)

    def finish(self, one: _Live) -> None:
        self.leave(one)
        request, asked = one.request, self.trace[one.number]
        self.run.outcomes.append(
            JobOutcome(
                request.job_id, request.tenant, request.gpus, asked.request.arrival_s, one.first_start_s or 0.0,
                self.now_s, asked.work, one.restarts, one.resizes, one.gpu_s, one.why,
            )
        )  # fmt: skip
        del self.live[request.job_id]

    # -- nodes

    def fail(self, name: str) -> None:
        number = self.free.index[name]
        node = self.free.nodes[number]
        if node.health == "down":
            return
        self.run.node_failures += 1
        for job in [one for one in self.running.values() if name in one.node_names]:
            one = self.live[job.job_id]
            self.advance(one)
            ran_s = max(0.0, self.now_s - one.run_began_s)
            lost_s = ran_s % self.options.checkpoint_every_s
            one.done = max(one.saved, one.done - one.rate * lost_s)
            self.stop(one)
            one.restarts += 1
            self.run.lost_work += one.rate * lost_s
            self.waiting[job.job_id] = one
        self.free.replace_node(number, replace(node, health="down", failures=node.failures + 1))
        if self.options.failures is not None and node.health != "cordoned":
            self.push(self.now_s + self.options.failures.repair_s, "repair", name)

    # -- decisions

    def snapshot(self) -> Snapshot:
        if self.speed.refreshes:
            self.refresh()
        nodes, running = self.free.nodes, MappingProxyType(self.running)
        return Snapshot(self.now_s, nodes, tuple(self.queue()), running, self.free.read_only(), self.quotas)

    def refresh(self) -> None:
        """What policies shall know about the jobs now."""
        for one in self.live.values():
            if one.places:
                self.advance(one)
            one.request = self.speed.refreshed(one.request, one.done)
            name = one.request.job_id
            if one.places and self.running[name].request is not one.request:
                self.running[name] = replace(self.running[name], request=one.request)

    def decide(self) -> None:
        snapshot = self.snapshot()
        began_s = time.thread_time()
        decisions = self.policy(snapshot)
        self.run.slowest_decision_s = max(self.run.slowest_decision_s, time.thread_time() - began_s)
        self.run.decisions += 1
        moves = [one for one in decisions if not isinstance(one, Waits)]
        started = any(isinstance(one, JobPlacement | Resize) for one in moves)
        self.in_vain = self.in_vain + 1 if self.waiting and not started else 0
        if self.options.check and moves and (wrong := violations(snapshot, moves)):
            raise BrokenPolicy(f"the policy broke a rule at {self.now_s:g} s: {wrong[0]}")
        if self.options.keep_log:
            self.run.log.append((self.now_s, tuple(decisions)))
        for decision in moves:
            if isinstance(decision, Eviction | Resize):
                one = self.live[decision.job_id]
                self.stop(one)
                one.saved = one.done  # a checkpoint is written first
                one.why = decision.reason
        for decision in moves:
            self.carry_out(decision)

    def carry_out(self, decision: Decision) -> None:
        """Of what is evicted or resized, the job has stopped already."""
        if isinstance(decision, Cordon):
            number = self.free.index[decision.node]
            node = self.free.nodes[number]
            if node.health == "ready":
                self.free.replace_node(number, replace(node, health="cordoned"))
                self.run.cordoned.append(decision.node)
            return
        one = self.live[decision.job_id]
        if isinstance(decision, JobPlacement):
            del self.waiting[decision.job_id]
            one.why = decision.reason
            first = one.first_start_s is None
            self.start(one, decision.places, one.request.startup_s if first else one.request.checkpoint_s)
        elif isinstance(decision, Eviction):
            one.restarts += 1
            self.run.evictions += 1
            self.waiting[decision.job_id] = one
        elif isinstance(decision, Resize):
            one.resizes += 1
            self.run.resizes += 1
            self.start(one, decision.places, one.request.checkpoint_s)


def play(
    nodes: Sequence[ClusterNode],
    trace: Sequence[TraceJob],
    policy: Policy,
    speed: JobSpeed | None = None,
    options: PlayOptions | None = None,
) -> ClusterRun:
    """The whole trace, until its last job ends or nothing can ever start again."""
    free = FreeCapacity(tuple(nodes))
    return _Player(trace, policy, speed or JobSpeed(), options or PlayOptions(), free).play()
