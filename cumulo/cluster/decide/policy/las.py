"""Least attained service in two queues: Tiresias' discretised 2D-LAS (Gu et al., NSDI 2019). Nothing is
predicted: jobs that have had little GPU time go before those that have had much, which are preempted for them."""

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Unfinished, Waits
from cumulo.cluster.decide.fit import Placer, only_gpus, pack_gang, tasks_that_fit, tell_started, tell_stopped
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity, members
from cumulo.cluster.decide.policy.fifo import why_not
from cumulo.cluster.decide.policy.quota_lines import KeyLines, QuotaLines, quota_lines
from cumulo.cluster.decide.queue import JobQueue, SortKey, ordered, shape_samples
from cumulo.cluster.decide.quotas import QuotaBook
from cumulo.cluster.decide.running import RunningView, table_of
from cumulo.cluster.decide.snapshot import Policy, Snapshot

_Ranking = Callable[[float], int]
_MOST_SORTED = 8192  # waiting jobs that are put in order besides
_MOST_IN_LINES = 4096  # the same, where tenants have quotas
# Of one decision; the second where tenants have limits, the third where every place is priced.
_MOST_STARTS, _MOST_LIMITED, _MOST_PRICED = 700, 400, 80


def least_attained_service(place: Placer, threshold_gpu_s: float = 16 * 3600.0, queues: int = 2) -> Policy:
    """`threshold_gpu_s`: GPU seconds after which a job goes to the second queue (the published default: 16
    hours); each further queue begins at twice that. Jobs that their tenants' limits refuse are passed over: no
    other job is preempted for them."""

    rank = _ranking(threshold_gpu_s, queues)
    lines: QuotaLines | None = None
    tried = float("nan"), 0  # how many jobs are tried in the next decision of this moment

    def policy(snapshot: Snapshot) -> list[Decision]:
        nonlocal lines, tried
        held = table_of(snapshot.running).view(rank, lambda: _Held(rank, threshold_gpu_s, queues))
        held.advance(snapshot.now_s)
        budget = WHOLE_GPU * int(snapshot.free.gpus[snapshot.free.ready].sum()) - held.fixed_milli
        key = _waiting_key(rank)
        waiting = snapshot.waiting
        if snapshot.quotas:
            lines = quota_lines(lines, snapshot, lambda _, queue: KeyLines(queue, key))
        if not (_sorted(waiting, key) if lines is None else lines.complete(_MOST_IN_LINES)):
            return [Unfinished(f"{len(waiting):,} waiting jobs were to be put in order")]
        starts = _most_starts(snapshot, place)
        most = tried[1] if tried[0] == snapshot.now_s else starts
        decided, more = _decided(snapshot, held, budget, key, lines, place, most)
        if more:
            decided.append(Unfinished("more jobs may start"))
            if sum(isinstance(one, JobPlacement) for one in decided) < starts // 2:
                # Most of them found no place. Asked again, they are tried again, and more behind them.
                most *= 4
            tried = snapshot.now_s, most
        return decided

    return policy


def _most_starts(snapshot: Snapshot, place: Placer) -> int:
    if hasattr(place, "started"):
        return _MOST_PRICED
    return _MOST_LIMITED if snapshot.quotas else _MOST_STARTS


def _sorted(waiting: Sequence[JobRequest], key: SortKey) -> bool:
    """Whether they were in order before, or are few; they are now."""
    if not isinstance(waiting, JobQueue) or len(waiting) <= _MOST_SORTED or waiting.keeps(key):
        return True
    ordered(waiting, key)
    return False


def _decided(
    snapshot: Snapshot,
    held: "_Held",
    budget: int,
    key: SortKey,
    lines: QuotaLines | None,
    place: Placer,
    most: int,
) -> tuple[list[Decision], bool]:
    """Which jobs stop and start, of the first so many for which there are GPUs; and whether more may start."""
    decided: list[Decision] = []
    started, most_started = 0, _most_starts(snapshot, place)
    stopping, starting, more = _within(budget, held, snapshot, key, lines, decided, most)
    free, book = snapshot.free.copy(), QuotaBook(snapshot)
    for name in stopping:
        stopped = snapshot.running[name]
        decided.append(Eviction(name, "jobs that had less GPU time go first"))
        free.release(stopped.request, stopped.places)
        tell_stopped(place, [stopped])
        book.count(stopped.request, -stopped.gpus)
    for job in starting:
        if started == most_started:
            return decided, True
        places = place(job, free)
        refused = why_not(job, free) if places is None else book.refuses(job)
        if places is None or refused is not None:
            decided.append(Waits(job.job_id, refused or ""))
        else:
            free.allocate(job, places)
            tell_started(place, job, places)
            book.count(job, job.gpus)
            decided.append(JobPlacement(job.job_id, places, "among those that had the least GPU time"))
            started += 1
    return decided, more


class _Held(RunningView):
    """The running jobs that may be preempted, in the order of their queues and arrivals. A job changes its place
    when it starts, ends, or comes to the end of its queue, and not otherwise."""

    def __init__(self, rank: _Ranking, threshold_gpu_s: float, queues: int) -> None:
        self.rank, self.threshold_gpu_s, self.queues = rank, threshold_gpu_s, queues
        self.keys: list[tuple[int, float, str]] = []
        self.milli: list[int] = []  # of GPUs that each asked for, in the same order
        self.fixed_milli = 0  # of those that may not be preempted
        self._now_s = float("-inf")
        self._known: dict[str, tuple[tuple[int, float, str], RunningJob]] = {}
        self._passes: list[tuple[float, str, RunningJob]] = []  # when a job comes to the end of its queue

    def add(self, job: RunningJob) -> None:
        if not job.request.preemptible:
            self.fixed_milli += _milli(job)
            return
        level = self.rank(job.attained_gpu_s(max(self._now_s, job.started_s)))
        key = (level, job.request.arrival_s, job.job_id)
        self._known[job.job_id] = key, job
        at = bisect.bisect(self.keys, key)
        self.keys.insert(at, key)
        self.milli.insert(at, job.request.tasks * job.request.milli_per_task)
        if level + 1 < self.queues and job.gpus:
            left = self.threshold_gpu_s * 2**level - job.request.attained_gpu_s
            heapq.heappush(self._passes, (job.started_s + left / job.gpus, job.job_id, job))

    def remove(self, job: RunningJob) -> None:
        if not job.request.preemptible:
            self.fixed_milli -= _milli(job)
            return
        at = bisect.bisect_left(self.keys, self._known.pop(job.job_id)[0])
        del self.keys[at], self.milli[at]

    def advance(self, now_s: float) -> None:
        self._now_s, early = now_s, []
        while self._passes and self._passes[0][0] <= now_s + 1e-6:
            passed = heapq.heappop(self._passes)
            _, name, job = passed
            key, known = self._known.get(name, (None, None))
            if key is None or known is not job:
                continue  # it ended, or was started anew
            if self.rank(job.attained_gpu_s(now_s)) == key[0]:
                early.append(passed)  # by a rounding error
            else:
                self.remove(job)
                self.add(job)
        for passed in early:
            heapq.heappush(self._passes, passed)


def _milli(job: RunningJob) -> int:
    return job.tasks * job.request.milli_per_task


@cache
def _ranking(threshold_gpu_s: float, queues: int) -> _Ranking:
    """Which queue a job of so much GPU time is in. One function for one setting, so that orders are kept."""

    def rank(attained_gpu_s: float) -> int:
        level = 0
        while level + 1 < queues and attained_gpu_s >= threshold_gpu_s * 2**level:
            level += 1
        return level

    return rank


@cache
def _waiting_key(rank: _Ranking) -> SortKey:
    return lambda job: (rank(job.attained_gpu_s), job.arrival_s)


def _within(
    budget: int,
    held: _Held,
    snapshot: Snapshot,
    key: SortKey,
    lines: QuotaLines | None,
    decided: list[Decision],
    most: int,
) -> tuple[list[str], list[JobRequest], bool]:
    """The running jobs that stop and the waiting ones that start: in order of their queues as many go on as there
    are GPUs for; one that is too large does not hold up smaller ones. Those that a limit refuses are told so in
    `decided`. And whether more than `most` could start: then only those stop that are in the way of the first."""
    stopping: list[str] = []
    starting: list[JobRequest] = []
    more = False
    keys, sizes, at = held.keys, held.milli, 0
    book = QuotaBook(snapshot)
    smallest = min((_asked(job) for job in shape_samples(snapshot.waiting)), default=0)
    for told, job in _allowed(snapshot, key, book, lines):
        decided += told
        if job is None:
            break
        until = bisect.bisect_left(keys, key(job), at)
        budget = _keep(at, until, held, budget, stopping)
        at = until
        if budget < smallest:
            break
        milli = _asked(job)
        if milli <= budget:
            if len(starting) == most:
                more = True
                break
            starting.append(job)
            budget -= milli
            book.count(job, job.gpus)
        book.most_gpus = budget / WHOLE_GPU
    if sum(sizes[at:]) > budget:
        _keep(at, len(keys), held, budget, stopping)
    return stopping, starting, more


def _allowed(
    snapshot: Snapshot, key: SortKey, book: QuotaBook, lines: QuotaLines | None
) -> Iterator[tuple[list[Waits], JobRequest | None]]:
    """The waiting jobs in order that no limit refuses, and who is told before each: of a tenant at its limit the
    first, and each that asks for less than all that were told before. Whoever asks for another has counted it."""
    if not snapshot.quotas:
        for job in ordered(snapshot.waiting, key):
            yield [], job
    elif lines is not None:
        lines.update(book)
        for some, candidate in lines.in_turn(book):
            yield some, None if candidate is None else candidate[2][0]
    else:
        told, least = list[Waits](), dict[str, float]()
        for job in ordered(snapshot.waiting, key):
            if job.gpus >= least.get(job.tenant, float("inf")):
                continue
            refused = book.refuses(job)
            if refused is None:
                yield told, job
                told = []
            else:
                told.append(Waits(job.job_id, refused))
                least[job.tenant] = job.gpus
        yield told, None


def _asked(job: JobRequest) -> int:
    return job.tasks * job.milli_per_task


def _keep(at: int, until: int, held: _Held, budget: int, stopping: list[str]) -> int:
    """What is left of the budget if these jobs go on; those for which nothing is left stop."""
    some = held.milli[at:until]
    wanted = sum(some)
    if wanted <= budget:
        return budget - wanted
    for number, milli in enumerate(some, at):
        if milli > budget:
            stopping.append(held.keys[number][2])
        else:
            budget -= milli
    return budget


def emptiest_first(job: JobRequest, free: FreeCapacity) -> tuple[TaskPlace, ...] | None:
    """Tasks of one GPU, always from the node with the most free GPUs: how the published simulators place."""
    if job.gpus_per_task != 1 or job.fractional:
        return pack_gang(job, free)
    places: list[TaskPlace] = []
    for node in _emptiest(job, free):
        able = [gpu for gpu, share in enumerate(free.gpu_milli[node].tolist()) if share == WHOLE_GPU]
        if not only_gpus(job):
            able = able[: int(tasks_that_fit(job, free)[node])]
        places += [TaskPlace(free.nodes[node].name, (gpu,)) for gpu in able[: job.tasks - len(places)]]
        if len(places) == job.tasks:
            return tuple(places)
    return None


def _emptiest(job: JobRequest, free: FreeCapacity) -> list[int]:
    """Nodes in this order, as many as the gang can need."""
    if not only_gpus(job):
        fits = tasks_that_fit(job, free)
        able = [(-int(fits[node]), node) for node in fits.nonzero()[0].tolist()]
        return [node for _, node in sorted(able)]
    usable, found, missing = free.usable_set(job.devices), list[int](), job.tasks
    for room in range(len(free.room) - 1, 0, -1):
        some = members(free.room[room] & usable, -(-missing // room))
        found += some
        missing -= room * len(some)
        if missing <= 0:
            break
    return found
