"""A trace played under a policy, in virtual time: events from a heap, one decision after each moment with events.

run = play(nodes, jobs, policy)
run.mean_jct_s, run.utilisation
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cumulo.cluster.decide.check import violations
from cumulo.cluster.decide.decisions import Cordon, Eviction, JobPlacement, Resize, Unfinished, Waits
from cumulo.cluster.decide.fit import slots
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity
from cumulo.cluster.decide.policy.fragmentation import fragmented_share, task_mix
from cumulo.cluster.decide.queue import JobQueue
from cumulo.cluster.decide.releases import Releases
from cumulo.cluster.decide.running import RunningTable, jobs_on_nodes
from cumulo.cluster.decide.shapes import ShapeKey, shape_key
from cumulo.cluster.decide.snapshot import Policy, Snapshot, TenantQuota
from cumulo.cluster.simulate.events import EventKind, Events
from cumulo.cluster.simulate.failures import FailureRates, failure_times
from cumulo.cluster.simulate.job_speed import FixedSpeed, JobSpeed, TraceJob
from cumulo.cluster.simulate.outcome import ClusterRun, JobOutcome, Segment
from cumulo.errors import CumuloError

_FRAGMENTATION_SAMPLES = 20
_MOST_ASKED = 10_000  # decisions at one moment
_SETTLED_S = 600.0  # rounds are left out for so long
_STARTS, _STOPS = (JobPlacement, Resize), (Eviction, Resize)


class BrokenPolicy(CumuloError):
    """A policy decided what cannot be carried out."""


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


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    interval_s: float = 0.0  # decide at multiples of this; 0: whenever something happens
    quotas: tuple[TenantQuota, ...] = ()
    failures: FailureRates | None = None
    checkpoint_every_s: float = 1800.0  # a failure loses what was done since
    seed: int = 0
    drop: bool = False  # a job that is not placed when it arrives leaves
    check: bool = True  # every decision is held against the rules
    keep_log: bool = False
    always_decide: bool = False  # also when nothing waits: elastic policies resize then
    told: Callable[[int, int], None] | None = None  # jobs finished, jobs


@dataclass
class _Player:
    nodes: list[ClusterNode]
    trace: Sequence[TraceJob]
    policy: Policy
    speed: JobSpeed
    options: PlayOptions
    now_s: float = 0.0
    live: dict[str, _Live] = field(default_factory=dict)
    running: RunningTable = field(default_factory=RunningTable)

    def __post_init__(self) -> None:
        self.events = Events(self.trace)
        self.waiting = JobQueue(
            shapes=not self.options.always_decide
        )  # elastic policies have no use for them
        self.free = FreeCapacity(self.nodes)
        self.snapshot_nodes = tuple(self.nodes)
        self.quotas = {quota.tenant: quota for quota in self.options.quotas}
        self.run = ClusterRun(self.snapshot_nodes)
        self.speed.beside(self.running)
        self.used_gpus = 0.0
        self.empty = FreeCapacity([replace(node, health="ready") for node in self.nodes])
        self.fitting: dict[ShapeKey, int] = {}  # tasks of each shape that the empty cluster can hold
        self.releases = Releases(self.free, self.running)
        self.counted_s = 0.0
        self.checked = 0
        self.settled_s: float | None = None  # when nothing was changed; None: something happened since

    # -- events

    def play(self) -> ClusterRun:
        events = self.events
        if self.options.failures is not None:
            last = max(job.request.arrival_s for job in self.trace) + 10 * max(job.work for job in self.trace)
            for at_s, node in failure_times(self.options.failures, len(self.nodes), last, self.options.seed):
                events.push(at_s, "fail", self.nodes[node].name)
        if self.options.interval_s:
            events.push(self.options.interval_s, "decide", "")
        finished = 0
        sample_every = max(1, len(self.trace) // _FRAGMENTATION_SAMPLES)
        mix = task_mix(job.request for job in self.trace)
        while len(self.run.outcomes) + len(self.run.impossible) < len(self.trace):
            now_s = events.next_s()
            if now_s is None:
                break
            self.count_until(now_s)
            self.now_s = now_s
            decide = not self.options.interval_s
            while (event := events.pop(now_s)) is not None:
                _, _, kind, name, number = event
                if kind == "decide":
                    decide = True
                    events.push(self.now_s + self.options.interval_s, "decide", "")
                else:
                    self.happen(kind, name, number)
            if decide and (self.waiting or (self.options.always_decide and not self.settled())):
                self.decide()
            if len(self.run.outcomes) != finished:
                finished = len(self.run.outcomes)
                if finished % sample_every == 0:
                    self.run.fragmented.append(fragmented_share(self.free, mix))
                if self.options.told is not None:
                    self.options.told(finished, len(self.trace))
            if not self.running and self.waiting and self.stuck():
                break
        return self.run.closed(self.now_s, [self.live[job.job_id].request for job in self.waiting])

    def settled(self) -> bool:
        """Whether this round can be left out: nothing happened since one that changed nothing. But jobs grow older,
        and older ones can afford a restart: so that it is not left out for long."""
        return (
            self.settled_s is not None
            and self.options.interval_s > 0
            and not self.speed.refreshes
            and self.now_s - self.settled_s < _SETTLED_S
        )

    def stuck(self) -> bool:
        """Nothing runs, something waits, and only failures or repairs are to come: it will wait for ever."""
        return not self.events.may_start_jobs() and (not self.options.interval_s or self.checked > 2)

    def happen(self, kind: EventKind, name: str, number: int) -> None:
        self.checked = 0
        if kind == "arrive":
            job = self.trace[number]
            if not self.possible(job.request):
                self.run.impossible.append(job.request)
                return
            self.live[name] = _Live(job.request, job.work, number)
            self.enqueue(job.request, number)
            self.settled_s = None
        elif kind == "advance":
            one = self.live.get(name)
            if one is not None and one.event == number and one.places:
                self.settled_s = None
                self.advance(one)
                # This is when it gets there. Late in a long trace the clock's last digit is worth more than what is
                # left: counted from the clock alone, it would come closer for ever and never end.
                one.done = max(one.done, min(one.work, one.changes_at))
                if one.done >= one.work:
                    self.finish(one)
                else:
                    self.go_on(one)
        elif kind == "fail":
            self.fail(name)
        elif kind == "repair":
            self.set_health(name, replace(self.nodes[self.free.index[name]], health="ready"))

    def possible(self, job: JobRequest) -> bool:
        """Whether an empty and whole cluster could run it: a queue must not wait for a job that never starts."""
        shape = shape_key(job)
        known = self.fitting.get(shape)
        if known is None:
            known = self.fitting[shape] = slots(job, self.empty)
        return known >= (job.min_tasks or job.tasks)

    def enqueue(self, request: JobRequest, number: int) -> None:
        self.waiting.add(request, number)

    # -- jobs

    def advance(self, one: _Live) -> None:
        """Work done until now, at the rate it had."""
        ran_s = self.now_s - one.since_s
        if ran_s > 0:
            one.gpu_s += one.gpus * ran_s
            one.done = min(one.work, one.done + one.rate * ran_s)
            one.since_s = self.now_s

    def go_on(self, one: _Live) -> None:
        """The next event of this job: its end, or when its rate changes."""
        one.rate, one.changes_at = self.speed.rate(one.request, one.places, one.done)
        one.event += 1
        if one.rate > 0:
            until = min(one.work, one.changes_at) - one.done
            began_s = max(self.now_s, one.since_s)
            self.events.push(began_s + until / one.rate, "advance", one.request.job_id, one.event)

    def start(self, one: _Live, places: tuple[TaskPlace, ...], pause_s: float) -> None:
        request = one.request
        self.free.allocate(request, places)
        one.places, one.gpus = places, len(places) * request.milli_per_task / WHOLE_GPU
        one.run_began_s = self.now_s
        one.since_s = self.now_s + pause_s
        if one.first_start_s is None:
            one.first_start_s = self.now_s
        expected = None if request.predicted_s is None else one.since_s + request.predicted_s
        self.running.put(RunningJob(request, places, self.now_s, expected, one.restarts + one.resizes))
        self.releases.add(request, places, expected)
        self.used_gpus += one.gpus
        self.go_on(one)

    def stop(self, one: _Live) -> None:
        """Frees its places, before it waits again: what it was told about its past is kept in its request."""
        run = self.leave(one)
        request, left = one.request, None
        if request.predicted_s is not None:
            ran_s = max(0.0, self.now_s - run.started_s - request.startup_s)
            left = max(request.predicted_s - ran_s, 0.05 * request.predicted_s)
        one.request = request.after_run(run.attained_gpu_s(self.now_s), left)

    def leave(self, one: _Live) -> RunningJob:
        self.advance(one)
        request = one.request
        self.run.segments.append(Segment(request.job_id, one.run_began_s, self.now_s, one.places))
        self.free.release(request, one.places)
        self.used_gpus -= one.gpus
        run = self.running.drop(request.job_id)
        self.releases.remove(request, one.places, run.expected_end_s)
        one.places, one.event = (), one.event + 1
        return run

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

    def set_health(self, name: str, node: ClusterNode) -> None:
        number = self.free.index[name]
        self.nodes[number] = node
        self.snapshot_nodes = tuple(self.nodes)
        self.free.nodes = self.snapshot_nodes
        ready = self.free.ready.copy()
        ready[number] = node.health == "ready"
        self.free.set_ready(ready)
        self.releases.set_health(number)
        self.settled_s = None

    def fail(self, name: str) -> None:
        node = self.nodes[self.free.index[name]]
        if node.health == "down":
            return
        self.run.node_failures += 1
        hit = list(jobs_on_nodes(self.running).get(name, {}).values())
        for job in hit:
            one = self.live[job.job_id]
            self.advance(one)
            ran_s = max(0.0, self.now_s - one.run_began_s)
            lost_s = ran_s % self.options.checkpoint_every_s
            one.done = max(one.saved, one.done - one.rate * lost_s)
            self.stop(one)
            one.restarts += 1
            self.run.lost_work += one.rate * lost_s
            self.enqueue(one.request, one.number)
        cordoned = node.health == "cordoned"
        self.set_health(name, replace(node, health="down", failures=node.failures + 1))
        if self.options.failures is not None and not cordoned:
            self.events.push(self.now_s + self.options.failures.repair_s, "repair", name)

    # -- decisions

    def snapshot(self) -> Snapshot:
        if self.speed.refreshes:
            self.refresh()
        return Snapshot(
            self.now_s, self.snapshot_nodes, self.waiting, self.running, self.free, self.quotas, self.releases
        )

    def refresh(self) -> None:
        for name, job in self.running.items():
            one = self.live[name]
            self.advance(one)
            fresh = self.speed.refreshed(one.request, one.done)
            if fresh is not one.request:
                one.request = fresh
                self.running.swap(replace(job, request=fresh))
        for waiting in list(self.waiting):
            one = self.live[waiting.job_id]
            one.request = self.speed.refreshed(one.request, one.done)
            self.waiting.replace(one.request)

    def decide(self) -> None:
        asked = 1
        while self.decide_part():
            asked += 1
            if asked > _MOST_ASKED:
                raise BrokenPolicy(f"at {self.now_s:g} s the policy was unfinished {_MOST_ASKED:,} times")
        if self.options.drop:
            for job in list(self.waiting):
                self.waiting.remove(job.job_id)
                del self.live[job.job_id]
                self.run.dropped.append(job)

    def decide_part(self) -> bool:
        """Whether there is more to decide at this moment."""
        snapshot = self.snapshot()
        decisions = self.policy(snapshot)
        self.run.decisions += 1
        moves = [one for one in decisions if not isinstance(one, Waits)]
        idle = not any(isinstance(one, _STARTS) for one in moves)
        self.checked = self.checked + 1 if idle and self.waiting else 0
        self.settled_s = None if moves else self.now_s
        if self.options.check and moves and (wrong := violations(snapshot, moves)):
            raise BrokenPolicy(f"the policy broke a rule at {self.now_s:g} s: {wrong[0]}")
        if self.options.keep_log:
            self.run.log.append((self.now_s, tuple(decisions)))
        for decision in moves:
            if isinstance(decision, _STOPS):
                self.stop_for(decision)
        for decision in moves:
            self.carry_out(decision)
        return any(isinstance(one, Unfinished) for one in moves)

    def stop_for(self, decision: Eviction | Resize) -> None:
        one = self.live[decision.job_id]
        self.stop(one)
        one.saved = one.done  # a checkpoint is written first
        one.why = decision.reason

    def carry_out(self, decision: JobPlacement | Eviction | Resize | Cordon | Unfinished) -> None:
        if isinstance(decision, JobPlacement):
            one = self.live[decision.job_id]
            self.waiting.remove(decision.job_id)
            one.why = decision.reason
            first = one.first_start_s is None
            self.start(one, decision.places, one.request.startup_s if first else one.request.checkpoint_s)
        elif isinstance(decision, Eviction):
            one = self.live[decision.job_id]
            one.restarts += 1
            self.run.evictions += 1
            self.enqueue(one.request, one.number)
        elif isinstance(decision, Resize):
            one = self.live[decision.job_id]
            one.resizes += 1
            self.run.resizes += 1
            self.start(one, decision.places, one.request.checkpoint_s)
        elif isinstance(decision, Cordon):
            node = self.nodes[self.free.index[decision.node]]
            if node.health == "ready":
                self.set_health(decision.node, replace(node, health="cordoned"))
                self.run.cordoned.append(decision.node)

    # -- what is counted over time

    def count_until(self, at_s: float) -> None:
        self.run.used_gpu_s += self.used_gpus * (at_s - self.counted_s)
        self.counted_s = at_s


def play(
    nodes: Sequence[ClusterNode],
    trace: Sequence[TraceJob],
    policy: Policy,
    speed: JobSpeed | None = None,
    options: PlayOptions | None = None,
) -> ClusterRun:
    """The whole trace, until its last job ends or nothing can ever start again."""
    collects = gc.isenabled()
    gc.disable()  # it would walk a hundred thousand jobs again and again, in the middle of decisions
    try:
        return _Player(list(nodes), trace, policy, speed or FixedSpeed(), options or PlayOptions()).play()
    finally:
        if collects:
            gc.enable()
