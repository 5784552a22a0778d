"""The ends of running jobs, played ahead: after which of them a gang fits that asks for more than whole GPUs, and
the cluster at that moment. Reservations ask; what they found is kept from one decision to the next, because most
of it stays as it is: a job that ends as predicted changes nothing at a later moment.
"""

from collections.abc import Callable, Iterable, Sequence

from cumulo.cluster.decide.check import has_left, left_on, take_from
from cumulo.cluster.decide.fit import Placer
from cumulo.cluster.decide.fit_tables import fit_table
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.node_state import NodeState
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.running import RunningView
from cumulo.cluster.decide.snapshot import SameState, Snapshot

_MOST_KEPT = 32  # reserved jobs
_MOST_CHANGES = 10_000  # of the running jobs that are written down
_MANY_CHANGES = 64  # since a moment was last asked for: it is made anew

Places = tuple[TaskPlace, ...]
_Change = tuple[RunningJob, bool]  # a job, and whether it ended; else it started


def ends_until_it_fits(
    job: JobRequest,
    free: FreeCapacity,
    ends: Sequence[tuple[float, str]],
    running: Callable[[str], RunningJob],
) -> list[RunningJob] | None:
    """The jobs after whose ends, one after another, all tasks of a gang fit; None: not even after all of them."""
    left: _LeftShares | _LeftNodes = (_LeftShares if job.fractional else _LeftNodes)(job, free)
    played = list[RunningJob]()
    missing, each = job.tasks - left.able, max(1, job.gpus_per_task)
    for _, name in ends:
        one = running(name)
        played.append(one)
        left.leave(one)
        missing -= -(-one.tasks * max(1, one.request.gpus_per_task) // each)
        if missing > 0 and len(played) < len(ends):
            continue  # by the GPUs alone it is not enough yet
        missing = job.tasks - left.count()
        if missing <= 0:
            return played
    return None


class _LeftNodes:
    """The nodes that jobs leave, and how many tasks of a gang fit; all others stay as they are. It counts what is
    gained on each node, and looks at a node only when it is asked how many fit."""

    def __init__(self, job: JobRequest, free: FreeCapacity) -> None:
        table = fit_table(job, free)
        self.job, self.free, self.fits = job, free, table.fits
        self.able = table.total  # tasks that fit, when they were last counted
        self.gains: dict[int, list[int]] = {}  # of each node: whole GPUs, thousandths of cores, and memory
        self.tasks: dict[int, int] = {}  # that were counted there
        self.changed: dict[int, list[int]] = {}  # since
        self.shares: dict[tuple[int, int], int] = {}  # of GPUs that were shared: what is free

    def leave(self, one: RunningJob) -> None:
        index, gains, request = self.free.index, self.gains, one.request
        gpus, cpu_milli, memory_mib = request.gpus_per_task, request.cpu_milli, request.memory_mib
        for place in one.places:
            node = index[place.node]
            gain = gains.get(node)
            if gain is None:
                gain = gains[node] = [0, 0, 0]
            gain[0] += gpus if request.gpu_milli == WHOLE_GPU else self._left_share(node, request, place)
            gain[1] += cpu_milli
            gain[2] += memory_mib
            self.changed[node] = gain

    def _left_share(self, node: int, request: JobRequest, place: TaskPlace) -> int:
        """1: it was the last on its GPU."""
        key = node, place.gpus[0]
        known = self.shares.get(key)
        share = (self.free.gpu_milli.item(*key) if known is None else known) + request.gpu_milli
        self.shares[key] = share
        return int(share == WHOLE_GPU)

    def count(self) -> int:
        """Tasks that fit now."""
        free, job, each = self.free, self.job, self.job.gpus_per_task
        for node, (gpus, cpu_milli, memory_mib) in self.changed.items():
            if not free.ready.item(node) or (job.devices and free.nodes[node].device not in job.devices):
                continue
            tasks = (free.whole.item(node) + gpus) // each if each else job.tasks
            if job.cpu_milli:
                tasks = min(tasks, (free.cpu_milli.item(node) + cpu_milli) // job.cpu_milli)
            if job.memory_mib:
                tasks = min(tasks, (free.memory_mib.item(node) + memory_mib) // job.memory_mib)
            before = self.tasks.get(node)
            self.able += tasks - (self.fits.item(node) if before is None else before)
            self.tasks[node] = tasks
        self.changed.clear()
        return self.able


class _LeftShares:
    """The same for a gang that asks for shares of GPUs: what is free of every GPU."""

    def __init__(self, job: JobRequest, free: FreeCapacity) -> None:
        table = fit_table(job, free)
        self.job, self.free, self.fits = job, free, table.fits
        self.able = table.total  # tasks that fit, when they were last counted
        self.states: dict[int, NodeState | None] = {}  # None: of no use for the gang
        self.tasks: dict[int, int] = {}  # that were counted there
        self.changed: dict[int, NodeState] = {}  # since

    def leave(self, one: RunningJob) -> None:
        index, states, request = self.free.index, self.states, one.request
        for place in one.places:
            node = index[place.node]
            if node in states:
                state = states[node]
            else:
                state = states[node] = self._state(node)
            if state is not None:
                state.move_task(request, place, 1)
                self.changed[node] = state

    def _state(self, node: int) -> NodeState | None:
        free, job = self.free, self.job
        if not free.ready.item(node) or (job.devices and free.nodes[node].device not in job.devices):
            return None
        self.tasks[node] = self.fits.item(node)
        return NodeState(job, free, node)

    def count(self) -> int:
        """Tasks that fit now."""
        for node, state in self.changed.items():
            tasks = state.tasks()
            self.able += tasks - self.tasks[node]
            self.tasks[node] = tasks
        self.changed.clear()
        return self.able


class Moment:
    """The cluster when a reserved job starts, and where that job is then. It is kept while others start and end."""

    def __init__(self, job: JobRequest, free: FreeCapacity, started: Iterable[RunningJob], seen: int) -> None:
        """`started`: by this decision, which are left out."""
        self.job, self.of = job, free
        self.nodes, self.ready = free.nodes, free.ready
        self.free = free.copy()
        for one in started:
            self.free.release(one.request, one.places)
        self.seen = seen  # so many changes of the running jobs are in it
        self._played: dict[str, RunningJob] = {}  # running jobs that have ended then
        self._on: dict[str, list[TaskPlace]] = {}  # tasks of the reserved job, on each node
        self._left: dict[str, list[int]] = {}  # next to them, on the nodes that somebody asked about
        self._before: list[RunningJob] = []  # started by the decision before the reserved job was placed
        self._after: list[tuple[JobRequest, Places]] = []  # and after it

    def is_of(self, job: JobRequest, free: FreeCapacity) -> bool:
        """Whether it can be brought up to date: the same job, on the same nodes."""
        same = self.job is job and self.of is free
        return same and self.nodes is free.nodes and self.ready is free.ready

    def has_room(self, job: JobRequest, places: Places) -> bool:
        """Whether these places are free then."""
        if len(places) == 1:
            return has_left(self._left_beside(places[0].node), job, places[0].gpus)
        left: dict[str, list[int]] = {}
        for place in places:
            if place.node not in left:
                left[place.node] = self._left_beside(place.node).copy()
            if not take_from(left[place.node], job, place.gpus, -1):
                return False
        return True

    def _left_beside(self, node: str) -> list[int]:
        """What is free on a node next to the reserved job. Many jobs ask about the same nodes."""
        known = self._left.get(node)
        if known is None:
            known = self._left[node] = left_on(self.free, self.free.index[node])
            for task in self._on.get(node, ()):
                take_from(known, self.job, task.gpus, -1)
        return known

    def add(self, job: JobRequest, places: Places) -> None:
        """Another job that the decision starts has these places then."""
        self.free.allocate(job, places)
        self._after.append((job, places))
        for place in places:
            self._left.pop(place.node, None)

    def update(
        self,
        changes: Sequence[_Change],
        played: Iterable[RunningJob],
        before: list[RunningJob],
        place: Placer,
    ) -> None:
        """Takes back what the last decision tried, and brings it up to date. `played`: the running jobs that have
        ended then; `before`: those that this decision started before, and that still run then."""
        self._left.clear()
        for job, places in self._after:
            self.free.release(job, places)
        self._after.clear()
        moves = self._moves(changes, {one.job_id: one for one in played})
        told = hasattr(place, "started")  # such a placer looks at more than what is free
        moves = [*((one, True) for one in self._before), *moves, *((one, False) for one in before)]
        self._before = before
        if moves or told or not self._on:
            for one, ends in moves:
                (self.free.release if ends else self.free.allocate)(one.request, one.places)
            self._on = {}
            for task in place(self.job, self.free) or ():
                self._on.setdefault(task.node, []).append(task)
            assert self._on  # placers find places where there are enough

    def _moves(self, changes: Sequence[_Change], played: dict[str, RunningJob]) -> list[_Change]:
        """Jobs, and whether they end: a job that was to have ended then, and did, is not among them."""
        moves: list[_Change] = []
        for one, ends in changes:
            if ends and self._played.get(one.job_id) is one:
                del self._played[one.job_id]
            elif not ends and played.get(one.job_id) is one:
                self._played[one.job_id] = one
            else:
                moves.append((one, ends))
        moves += [(one, True) for name, one in played.items() if self._played.get(name) is not one]
        moves += [(one, False) for name, one in self._played.items() if played.get(name) is not one]
        self._played = played
        return moves


class EndsAhead(RunningView):
    """What was found for reserved jobs, kept up to date with the jobs that run."""

    def __init__(self) -> None:
        self._changes: list[_Change] = []
        self._moments: dict[str, Moment] = {}
        self._ends: dict[str, tuple[JobRequest, SameState, list[RunningJob] | None]] = {}

    def add(self, job: RunningJob) -> None:
        self._change(job, False)

    def remove(self, job: RunningJob) -> None:
        self._change(job, True)

    def _change(self, job: RunningJob, ends: bool) -> None:
        if len(self._changes) >= _MOST_CHANGES:
            self._changes.clear()
            self._moments.clear()
        self._changes.append((job, ends))

    def until_it_fits(
        self,
        job: JobRequest,
        snapshot: Snapshot,
        ends: Sequence[tuple[float, str]],
        started: Sequence[RunningJob],
    ) -> list[RunningJob] | None:
        """As `ends_until_it_fits`, next to the jobs that this decision started."""
        new, running = {one.job_id: one for one in started}, snapshot.running
        known = None if new else self._ends.get(job.job_id)
        if known is not None and known[0] is job and known[1].holds(snapshot):
            return known[2]
        found = ends_until_it_fits(job, snapshot.free, ends, lambda name: new.get(name) or running[name])
        state = None if new else SameState.noted(snapshot)
        if state is not None:
            if len(self._ends) >= _MOST_KEPT:
                self._ends.clear()
            self._ends[job.job_id] = job, state, found
        return found

    def moment(
        self,
        job: JobRequest,
        free: FreeCapacity,
        played: Sequence[RunningJob],
        started: Sequence[RunningJob],
        before: int,
        place: Placer,
    ) -> Moment:
        """The cluster after these ends. `started`: by this decision, so many of them before the reservation."""
        moment = self._moments.pop(job.job_id, None)
        count = len(self._changes)
        if moment is None or not moment.is_of(job, free) or count - moment.seen > _MANY_CHANGES:
            moment = Moment(job, free, started, count)
        new, gone = {one.job_id for one in started}, {one.job_id for one in played}
        still = [one for one in started[:before] if one.job_id not in gone]
        moment.update(
            self._changes[moment.seen :], [one for one in played if one.job_id not in new], still, place
        )
        moment.seen = count
        if len(self._moments) >= _MOST_KEPT:
            del self._moments[next(iter(self._moments))]
        self._moments[job.job_id] = moment
        return moment
