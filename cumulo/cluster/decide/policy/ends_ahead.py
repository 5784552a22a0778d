"""The ends of running jobs, played ahead: after which of them a gang fits that asks for more than whole GPUs, on
which nodes, and what is free at that moment on the nodes that somebody asks about. Reservations ask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cumulo.cluster.decide.check import has_left, left_on, take_from
from cumulo.cluster.decide.fit import AbleNode, NodesThen, Placer, packed_among, packs, task_gpus
from cumulo.cluster.decide.fit_tables import FitsOnDevices, FitTable, fit_table
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.node_state import NodeState
from cumulo.cluster.decide.nodes import FreeCapacity, members
from cumulo.cluster.decide.running import RunningView
from cumulo.cluster.decide.snapshot import SameState, Snapshot

_MOST_KEPT = 32  # reserved jobs

Places = tuple[TaskPlace, ...]


@dataclass(slots=True)
class EndsUntil:
    """The ends after which all tasks of a gang fit."""

    played: list[RunningJob]
    able: list[AbleNode]  # all nodes that can take a task then, in order
    gained: dict[int, int]  # of nodes: whole GPUs that are free then and not now; only of gangs of whole GPUs
    then: FreeCapacity | None = None  # the cluster at that moment, for placers that look at all of it


def ends_until_it_fits(
    job: JobRequest,
    free: FreeCapacity,
    ends: Sequence[tuple[float, str]],
    running: Callable[[str], RunningJob],
) -> EndsUntil | None:
    """The ends, one after another, after which all tasks of a gang fit; None: not even after all of them."""
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
            return EndsUntil(played, sorted(left.able_nodes(), key=_number), left.gained())
    return None


def _number(node: AbleNode) -> int:
    return node[1]


class _LeftNodes:
    """The nodes that jobs leave, and how many tasks of a gang fit; all others stay as they are. It counts what is
    gained on each node, and looks at a node only when it is asked how many fit."""

    def __init__(self, job: JobRequest, free: FreeCapacity) -> None:
        table = fit_table(job, free)
        self.job, self.free, self.table, self.fits = job, free, table, table.fits
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
            gain[0] += self._left_share(node, request, place) if request.fractional else gpus
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

    def able_nodes(self) -> list[AbleNode]:
        """All nodes that could take a task, as they were last counted."""
        whole, gains = self.free.whole, self.gains
        found = [
            (whole.item(node) + gains[node][0], node, tasks) for node, tasks in self.tasks.items() if tasks
        ]
        others = _able_besides(self.tasks, self.table)
        return found + [(whole.item(node), node, self.fits.item(node)) for node in others]

    def gained(self) -> dict[int, int]:
        return {node: gpus for node, (gpus, _, _) in self.gains.items() if gpus}


class _LeftShares:
    """The same for a gang that asks for shares of GPUs: what is free of every GPU."""

    def __init__(self, job: JobRequest, free: FreeCapacity) -> None:
        table = fit_table(job, free)
        self.job, self.free, self.table, self.fits = job, free, table, table.fits
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

    def able_nodes(self) -> list[AbleNode]:
        """All nodes that could take a task, as they were last counted."""
        free, tasks = self.free, self.tasks
        found = [
            (self._left(one.shares), node, tasks[node])
            for node, one in self.states.items()
            if one and tasks[node]
        ]
        others = _able_besides(tasks, self.table)
        return found + [
            (self._left(free.gpu_milli[node].tolist()), node, self.fits.item(node)) for node in others
        ]

    def gained(self) -> dict[int, int]:
        return {}  # nobody asks

    def _left(self, shares: list[int]) -> int:
        return sum(shares) if self.job.tasks == 1 else shares.count(WHOLE_GPU)


def _able_besides(counted: dict[int, int], table: FitTable | FitsOnDevices) -> list[int]:
    """Nodes that could take a task now, without those that were counted."""
    if not table.total:
        return []
    return [node for node in members(table.able, table.total) if node not in counted]


class Moment:
    """What is free when a reserved job starts, next to that job, on the nodes that somebody asks about."""

    def __init__(
        self, job: JobRequest, free: FreeCapacity, ends: EndsUntil, started: Sequence[RunningJob], after: int,
        place: Placer,
    ) -> None:  # fmt: skip
        """`started`: by the decision, whose list grows; so many of them before the start was reserved."""
        self.job, self._free = job, free
        self._started, self._after = started, after
        self._ended: dict[
            str, list[tuple[JobRequest, tuple[int, ...]]]
        ] = {}  # tasks that ended, on each node
        for one in ends.played:
            for task in one.places:
                self._ended.setdefault(task.node, []).append((one.request, task.gpus))
        self._left: dict[str, list[int]] = {}  # on the nodes that somebody asked about
        self._tasks: dict[str, int] = {}  # of the reserved job, on each node
        self._on: dict[str, list[tuple[int, ...]]] | None = None  # their GPUs, where the placer chose them
        nodes_then: NodesThen | None = getattr(place, "nodes_then", None)
        if packs(place, job):
            self._tasks = {free.nodes[node].name: tasks for node, tasks in packed_among(job, ends.able)}
        elif nodes_then is not None and after == len(started):
            counts = nodes_then(job, free, ends.able, ends.gained)
            self._tasks = {free.nodes[node].name: tasks for node, tasks in counts}
        else:
            self._on = self._placed(ends, place)

    def _placed(self, ends: EndsUntil, place: Placer) -> dict[str, list[tuple[int, ...]]]:
        if ends.then is None:
            ends.then = self._free.copy()
            for one in [*self._started[self._after :], *ends.played]:
                ends.then.release(one.request, one.places)
        found: dict[str, list[tuple[int, ...]]] = {}
        for task in place(self.job, ends.then) or ():
            found.setdefault(task.node, []).append(task.gpus)
        assert found  # placers find places where there are enough
        return found

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

    def too_little_for(self, job: JobRequest, able: list[AbleNode]) -> bool:
        """Whether a gang of whole GPUs has places that are not free then, wherever it is placed now; `able`: the
        nodes that could take a task of it now."""
        free, missing, each = self._free, job.tasks, job.gpus_per_task
        for _, node, tasks in able:
            left = self._left_beside(free.nodes[node].name)
            now = free.gpu_milli[node].tolist()
            both = [gpu for gpu, share in enumerate(now) if share == WHOLE_GPU and left[gpu + 2] == WHOLE_GPU]
            tasks = min(tasks, len(both) // each)
            if job.cpu_milli:
                tasks = min(tasks, left[0] // job.cpu_milli)
            if job.memory_mib:
                tasks = min(tasks, left[1] // job.memory_mib)
            missing -= tasks
            if missing <= 0:
                return False
        return True

    def add(self, job: JobRequest, places: Places) -> None:
        """Another job that the decision starts now has these places then."""
        for place in places:
            take_from(self._left_beside(place.node), job, place.gpus, -1)

    def _left_beside(self, node: str) -> list[int]:
        """What is free on a node next to the reserved job. Many jobs ask about the same nodes."""
        known = self._left.get(node)
        if known is not None:
            return known
        left = self._left[node] = left_on(self._free, self._free.index[node])
        for request, gpus in self._ended.get(node, ()):
            take_from(left, request, gpus, 1)
        # Those that the decision started since end before, or they would have asked about this node.
        for one in self._started[self._after :]:
            for task in one.places:
                if task.node == node:
                    take_from(left, one.request, task.gpus, 1)
        if self._on is not None:
            own = self._on.get(node, [])
        else:
            own = task_gpus(self.job, left[2:], self._tasks.get(node, 0))
        for gpus in own:
            take_from(left, self.job, gpus, -1)
        return left


class EndsAhead(RunningView):
    """What was found for reserved jobs: it holds until a job starts or ends."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[JobRequest, SameState, EndsUntil | None]] = {}

    def add(self, job: RunningJob) -> None:
        pass  # the state of the cluster tells

    def remove(self, job: RunningJob) -> None:
        pass

    def until_it_fits(
        self,
        job: JobRequest,
        snapshot: Snapshot,
        ends: Sequence[tuple[float, str]],
        started: Sequence[RunningJob],
    ) -> EndsUntil | None:
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
