"""The jobs that wait, kept in order. Players keep one queue up to date; a policy reads it in the order it wants,
and nothing is sorted again when one job of fifty thousand changes.
"""

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, overload

from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest
from cumulo.cluster.decide.shapes import GangShape, GangShapes

SortKey = Callable[[JobRequest], Any]
# A job, its shape, its predicted seconds (infinite: unknown), its GPUs and thousandths of cores.
WaitingRow = tuple[JobRequest, GangShape, float, float, int]
# Thousandths of GPUs and of cores of several jobs together: numbers whose sums are exact, whatever their order.
AskedBefore = tuple[int, int]
# Thousandths of GPUs, thousandths of cores, arrivals, predicted seconds, and numbers of shapes.
RowColumns = tuple["array[float]", "array[float]", "array[float]", "array[float]", "array[float]"]
_STRETCH = 256  # rows that are made together, at most
_versions = itertools.count()


def by_arrival_key(job: JobRequest) -> float:
    return job.arrival_s


def _seconds(job: JobRequest) -> float:
    return float("inf") if job.predicted_s is None else job.predicted_s


def _length(job: JobRequest) -> tuple[float, str]:
    return _seconds(job), job.job_id


def _row(job: JobRequest, shape: GangShape) -> WaitingRow:
    gpus = job.tasks * job.gpus_per_task * job.gpu_milli / WHOLE_GPU
    return job, shape, _seconds(job), gpus, job.tasks * job.cpu_milli


def _values(row: WaitingRow) -> tuple[float, float, float, float, float]:
    """Of its columns."""
    return row[1].milli, row[4], row[0].arrival_s, row[2], row[1].number


class SortedJobs:
    """Jobs in the order of a key, the earlier number first among equals. The rows of the first are kept, as far as
    somebody read them: decisions read the same ones again and again."""

    __slots__ = ("_before", "_columns", "_first", "_row", "jobs", "key", "keys", "version")

    def __init__(
        self,
        key: SortKey,
        jobs: Iterable[tuple[int, JobRequest]],
        row: Callable[[JobRequest], WaitingRow],
    ) -> None:
        self.key, self._row = key, row
        rows = sorted(((key(job), number), job) for number, job in jobs)
        self.keys = [row[0] for row in rows]
        self.jobs = [row[1] for row in rows]
        self._first: list[WaitingRow] = []
        self._before: list[AskedBefore] = [(0, 0)]  # each of the first jobs, as far as somebody asked
        self._columns: RowColumns = array("d"), array("d"), array("d"), array("d"), array("d")
        # A number that no other state of any queue has, except those with more jobs at its end.
        self.version = next(_versions)

    def rows(self, at: int = 0) -> Iterator[WaitingRow]:
        """From the job of this number on."""
        return itertools.chain.from_iterable(self._stretches(at))

    def _stretches(self, at: int) -> Iterator[list[WaitingRow]]:
        first, jobs = self._first, self.jobs
        while at < len(jobs):
            if at >= len(first):
                # The further somebody reads, the more are made.
                first += map(self._row, jobs[len(first) : at + min(_STRETCH, 16 + at)])
            some = first[at : at + _STRETCH]
            yield some
            at += len(some)

    def asked_before(self, number: int) -> AskedBefore:
        """By all jobs before the one of this number."""
        before = self._before
        if number >= len(before):
            milli, cpu = before[-1]
            for row in itertools.islice(self.rows(len(before) - 1), number + 1 - len(before)):
                milli, cpu = milli + row[1].milli, cpu + row[4]
                before.append((milli, cpu))
        return before[number]

    def row_at(self, number: int) -> WaitingRow:
        """Of a job whose columns were read."""
        return self._first[number]

    def columns(self, number: int) -> RowColumns:
        """Of the jobs up to the one of this number, at least. To look at only."""
        columns = self._columns
        if number > len(columns[0]):
            for row in itertools.islice(self.rows(len(columns[0])), number - len(columns[0])):
                for column, value in zip(columns, _values(row), strict=True):
                    column.append(value)
        return self._columns

    def add(self, job: JobRequest, number: int) -> None:
        entry = (self.key(job), number)
        if not self.keys or self.keys[-1] < entry:
            self.keys.append(entry)
            self.jobs.append(job)
            return
        self.version = next(_versions)
        at = bisect.bisect(self.keys, entry)
        self.keys.insert(at, entry)
        self.jobs.insert(at, job)
        del self._before[at + 1 :]
        if at < len(self._first):
            row = self._row(job)
            self._first.insert(at, row)
            if at < len(self._columns[0]):
                for column, value in zip(self._columns, _values(row), strict=True):
                    column.insert(at, value)

    def remove(self, job: JobRequest, number: int) -> None:
        self.version = next(_versions)
        at = bisect.bisect_left(self.keys, (self.key(job), number))
        del self.keys[at], self.jobs[at], self._before[at + 1 :]
        if at < len(self._first):
            del self._first[at]
            if at < len(self._columns[0]):
                for column in self._columns:
                    del column[at]


class QueueView(Protocol):
    """What is worked out from all waiting jobs, one job at a time."""

    def add(self, job: JobRequest, number: int) -> None: ...
    def remove(self, job: JobRequest, number: int) -> None: ...


View = TypeVar("View", bound=QueueView)


class ShapesOfJobs:
    """The shapes of waiting jobs, and the jobs of each shape."""

    def __init__(self, shape: Callable[[JobRequest], GangShape], jobs: Iterable[JobRequest]) -> None:
        self._shape = shape
        self.known: dict[str, GangShape] = {}  # of each job
        # Predicted seconds and names, the shortest first.
        self.lengths: dict[GangShape, list[tuple[float, str]]] = {}
        self.sharing = 0  # jobs that could start where no GPU is entirely free
        for job in jobs:
            self.add(job)

    def add(self, job: JobRequest) -> None:
        shape = self.known[job.job_id] = self._shape(job)
        bisect.insort(self.lengths.setdefault(shape, []), _length(job))
        self.sharing += job.fractional or not job.gpus_per_task

    def remove(self, job: JobRequest) -> None:
        shape = self.known.pop(job.job_id)
        same = self.lengths[shape]
        del same[bisect.bisect_left(same, _length(job))]
        if not same:
            del self.lengths[shape]
        self.sharing -= job.fractional or not job.gpus_per_task


class JobQueue(Sequence[JobRequest]):
    """Waiting jobs in the order of arrival. `ordered(key)` is another order; `tenants` the queue of each tenant.
    What nobody asks for is not kept: each order, and the shapes of the jobs, from the first time on; unless
    `shapes` are to be kept from the start, because a decision would have to work out those of a long queue."""

    def __init__(self, shapes: bool = True) -> None:
        self._views: dict[SortKey, SortedJobs] = {}
        self._tenants: dict[SortKey, dict[str, SortedJobs]] = {}
        self._kept: dict[Any, QueueView] = {}
        self._known: dict[str, tuple[int, JobRequest]] = {}
        self._gangs = GangShapes()
        self.shape = self._gangs.shape
        self._shapes = ShapesOfJobs(self.shape, ()) if shapes else None
        self.arrivals: list[str] = []  # every job that ever joined, in that order
        self.touched: list[str] = []  # tenants whose jobs joined or left, in that order

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[JobRequest]:
        return iter(self._view(by_arrival_key).jobs)

    @overload
    def __getitem__(self, at: int) -> JobRequest: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[JobRequest]: ...
    def __getitem__(self, at: int | slice) -> JobRequest | Sequence[JobRequest]:
        return self._view(by_arrival_key).jobs[at]

    def find(self, job_id: str) -> JobRequest | None:
        known = self._known.get(job_id)
        return None if known is None else known[1]

    def add(self, job: JobRequest, number: int) -> None:
        """`number`: its place in the trace, which decides between jobs that arrive at the same moment."""
        self._known[job.job_id] = (number, job)
        self.arrivals.append(job.job_id)
        if self._shapes is not None:
            self._shapes.add(job)
        for view in self._views.values():
            view.add(job, number)
        for kept in self._kept.values():
            kept.add(job, number)
        self.touched.append(job.tenant)
        for key, lines in self._tenants.items():
            line = lines.get(job.tenant)
            if line is None:
                line = lines[job.tenant] = SortedJobs(key, (), self.row)
            line.add(job, number)

    def remove(self, job_id: str) -> JobRequest:
        number, job = self._known.pop(job_id)
        if self._shapes is not None:
            self._shapes.remove(job)
        for view in self._views.values():
            view.remove(job, number)
        for kept in self._kept.values():
            kept.remove(job, number)
        self.touched.append(job.tenant)
        for lines in self._tenants.values():
            lines[job.tenant].remove(job, number)
            if not lines[job.tenant].jobs:
                del lines[job.tenant]
        return job

    def replace(self, job: JobRequest) -> None:
        """What is asked for, or predicted, is another now."""
        number, old = self._known[job.job_id]
        if old is not job and old != job:
            self.remove(job.job_id)
            self.add(job, number)

    def _of_shapes(self) -> ShapesOfJobs:
        if self._shapes is None:
            self._shapes = ShapesOfJobs(self.shape, [job for _, job in self._known.values()])
        return self._shapes

    @property
    def shapes(self) -> Mapping[str, GangShape]:
        """Of each job."""
        return self._of_shapes().known

    @property
    def shapes_seen(self) -> int:
        """Of all jobs that ever joined: each has a number below this."""
        return len(self._gangs)

    @property
    def by_shape(self) -> Mapping[GangShape, Sequence[tuple[float, str]]]:
        """Predicted seconds and names of its jobs, the shortest first."""
        return self._of_shapes().lengths

    @property
    def sharing(self) -> int:
        """Jobs that could start where no GPU is entirely free."""
        return self._of_shapes().sharing

    def row(self, job: JobRequest) -> WaitingRow:
        return _row(job, self._of_shapes().known[job.job_id])

    def _view(self, key: SortKey) -> SortedJobs:
        known = self._views.get(key)
        if known is None:
            known = self._views[key] = SortedJobs(key, self._known.values(), self.row)
        return known

    def view(self, key: Any, make: Callable[[Iterable[tuple[int, JobRequest]]], View]) -> View:
        """The view of this key, kept from the first time it is asked for; made of numbers and jobs."""
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make(self._known.values())
        return cast(View, found)

    def ordered(self, key: SortKey) -> Sequence[JobRequest]:
        """`key`: always the same function for one order, and of the job alone."""
        return self._view(key).jobs

    def keeps(self, key: SortKey) -> bool:
        """Whether somebody asked for this order before."""
        return key in self._views

    def rows(self, key: SortKey) -> Iterator[WaitingRow]:
        """The same order, one by one."""
        return self._view(key).rows()

    def rows_behind(self, key: SortKey, entry: tuple[Any, int]) -> Iterator[WaitingRow]:
        """Those behind the one with this key and number."""
        view = self._view(key)
        return view.rows(bisect.bisect(view.keys, entry))

    @property
    def tenants(self) -> dict[str, Sequence[JobRequest]]:
        return {name: some.jobs for name, some in self.by_tenant.items()}

    @property
    def by_tenant(self) -> Mapping[str, SortedJobs]:
        return self.lines(by_arrival_key)

    def lines(self, key: SortKey) -> Mapping[str, SortedJobs]:
        """Each tenant's jobs in the order of a key; kept from the first time it is asked for."""
        found = self._tenants.get(key)
        if found is None:
            found = self._tenants[key] = {}
            for number, job in self._known.values():
                found.setdefault(job.tenant, SortedJobs(key, (), self.row)).add(job, number)
        return found


def ordered(waiting: Sequence[JobRequest], key: SortKey) -> Sequence[JobRequest]:
    """Waiting jobs in the order of a key; without sorting where a queue keeps that order."""
    return waiting.ordered(key) if isinstance(waiting, JobQueue) else sorted(waiting, key=key)


def tenant_queues(waiting: Sequence[JobRequest]) -> dict[str, Sequence[JobRequest]]:
    """Each tenant's jobs in the order of arrival."""
    if isinstance(waiting, JobQueue):
        return waiting.tenants
    found: dict[str, list[JobRequest]] = {}
    for job in waiting:
        found.setdefault(job.tenant, []).append(job)
    return dict(found)


def rows_in_order(waiting: Sequence[JobRequest], key: SortKey) -> Iterator[WaitingRow]:
    if isinstance(waiting, JobQueue):
        return waiting.rows(key)
    return _rows_of(waiting if key is by_arrival_key else sorted(waiting, key=key), GangShapes())


def tenant_rows(waiting: Sequence[JobRequest]) -> dict[str, Iterator[WaitingRow]]:
    """Each tenant's jobs in the order of arrival."""
    shapes = GangShapes()
    return {name: _rows_of(jobs, shapes) for name, jobs in tenant_queues(waiting).items()}


def _rows_of(jobs: Iterable[JobRequest], shapes: GangShapes) -> Iterator[WaitingRow]:
    return (_row(job, shapes.shape(job)) for job in jobs)


def shape_samples(waiting: Sequence[JobRequest]) -> Iterable[JobRequest]:
    """At least one waiting job of each shape."""
    if not isinstance(waiting, JobQueue):
        return waiting
    found = (waiting.find(lengths[0][1]) for lengths in waiting.by_shape.values())
    return [job for job in found if job is not None]
