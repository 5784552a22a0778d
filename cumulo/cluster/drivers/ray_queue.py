"""The queue of a Ray cluster: one detached actor named `queue` on the head, in which a `Supervisor` decides with
our policies what trains where. Whoever submits or looks starts it where it is missing; all that it knows is in the
store, so that another head's queue goes on where it ended.
"""

import contextlib
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

import ray
from ray._private.state import actors, available_resources_per_node
from ray.util.placement_group import placement_group_table

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.recovery import own_exit_code
from cumulo.cluster.drivers.local_supervisor import Supervisor
from cumulo.cluster.drivers.ray_job import (
    ACCELERATOR,
    GROUPS,
    ON_HEAD,
    JobKeeper,
    end_file,
    group_name,
    nodes_by_name,
    remove_groups,
)
from cumulo.cluster.job_store import JobRecord, JobStore, Target
from cumulo.cluster.served_shape import replica_actor

NAMESPACE, QUEUE = "cumulo", "queue"
AVOID_AFTER = 2  # failures of a job that began on a node
_LOOK_S, _FRESH_S = 1.0, 5.0
_LITTLE = 1e-6
_LEAF = "cumulo.dev/leaf"  # label of a node that names its leaf switch

_Nodes = Mapping[str, Mapping[str, Any]]  # as Ray lists them, by their names
_There = tuple[JobRequest, str]  # one task that is not the queue's, and its node
_Used = dict[str, tuple[int, int]]  # GPUs and thousandths of cores of each node


class RayQueue:
    def __init__(self, folder: str) -> None:
        self._supervisor, self._trouble = _supervisor(folder), ""
        threading.Thread(target=self._live, daemon=True).start()

    def cluster(self, folder: str) -> dict[str, str]:
        """By which name of the cluster the queue finds its jobs in this store, and what is wrong."""
        kept = str(self._supervisor.store.folder)
        if not Path(folder, "log.jsonl").exists():
            return {
                "refused": f"the head of the Ray cluster does not see {folder}: choose a --store on a shared disk"
            }
        if folder != kept and self._supervisor.jobs():
            told = f"a Ray cluster has one queue, and its jobs are in {kept}: launch with --store {kept}"
            return {"refused": f"{told}, or wait until they have ended"}
        if folder != kept:
            self._supervisor = _supervisor(folder)
        return {"handle": cluster_address(), "trouble": self._trouble}

    def _live(self) -> None:
        while True:
            try:
                self._supervisor.turn()
                self._trouble = ""
            except Exception as error:  # whoever looks is told, and the next turn tries again
                self._trouble = f"{type(error).__name__}: {error}"
            time.sleep(_LOOK_S)


def _supervisor(folder: str) -> Supervisor:
    store = JobStore(Path(folder))
    return Supervisor(store, RayPlayer(store))


def cluster_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


class RayPlayer:
    """Starts a keeper for each attempt of a training job. What else runs on the nodes is counted as used."""

    target: Target = "ray"

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self._looks: list[tuple[float, _Used]] = []  # the last ones at what others use, with their times

    def owns(self, record: JobRecord) -> bool:
        ours = record.target == "ray" and record.job.train is not None
        return ours and record.handle == cluster_address()

    def nodes(self) -> tuple[ClusterNode, ...]:
        return tuple(_node(name, node) for name, node in nodes_by_name().items())

    def request(self, record: JobRecord, left_s: float | None) -> JobRequest:
        strategy = record.job.ray.strategy or ("STRICT_SPREAD" if record.job.devices[0].per_node else "PACK")
        spread: Any = {"STRICT_SPREAD": "apart", "STRICT_PACK": "together"}.get(strategy, "any")
        request = record.job.request(record.job_id, record.submitted_s, left_s)
        return replace(request, spread=spread, avoid=_bad_nodes(record))

    def attempt(self, record: JobRecord) -> "GangAttempt":
        return GangAttempt(record)

    def start(self, record: JobRecord) -> None:
        end_file(record).parent.mkdir(parents=True, exist_ok=True)
        _head_file(record).write_text(_head(), "utf-8")
        keeper: Any = ray.remote(JobKeeper)
        keeper.options(
            name=_keeper_name(record), namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
            max_restarts=-1, max_task_retries=-1, num_cpus=0, resources=ON_HEAD,
        ).remote(record)  # fmt: skip

    def others(self) -> Sequence[RunningJob]:
        """Replicas of services, and what Ray has reserved on a node for nobody here. Only the number of their GPUs
        matters: they get those that no gang has."""
        nodes = nodes_by_name()
        jobs = [one for one in self.store.jobs().values() if one.target == "ray" and not one.ended]
        found = _replicas({one.job_id: one for one in jobs if one.job.serve is not None}, nodes)
        found += self._foreign(nodes, found)
        free = {name: set(range(int(node["Resources"].get("GPU", 0)))) for name, node in nodes.items()}
        for place in (place for one in jobs for place in one.places if place.node in free):
            free[place.node] -= set(place.gpus)
        places = []
        for request, name in found:
            gpus = [free[name].pop() for _ in range(min(request.gpus_per_task, len(free[name])))]
            places.append((TaskPlace(name, tuple(gpus)),))
        return [RunningJob(request, place) for (request, _), place in zip(found, places, strict=True)]

    def _foreign(self, nodes: _Nodes, known: Sequence[_There]) -> list[_There]:
        """What Ray says is free may be late: the median of the last looks counts."""
        now_s = time.monotonic()
        self._looks = [look for look in self._looks[-2:] if now_s - look[0] < _FRESH_S]
        self._looks.append((now_s, _used_by_others(nodes, known)))
        found = []
        for name in nodes:
            looks = zip(*(used[name] for _, used in self._looks if name in used), strict=True)
            gpus, cpu_milli = (max(0, median_low(column)) for column in looks)
            if gpus or cpu_milli:
                request = JobRequest(f"other work on {name}", 1, gpus, cpu_milli=cpu_milli, tenant="")
                found.append((replace(request, preemptible=False), name))
        return found


def _used_by_others(nodes: _Nodes, known: Sequence[_There]) -> _Used:
    """GPUs and thousandths of cores that Ray has reserved on each node, but not for the queue's gangs and these."""
    names, free = {node["NodeID"]: name for name, node in nodes.items()}, available_resources_per_node()
    ours = {name: Counter[str]() for name in nodes}
    for group in placement_group_table().values():
        if group["name"].startswith(GROUPS) and group["state"] == "CREATED":
            for number, bundle in group["bundles"].items():
                if (node_id := group["bundles_to_node_id"][number]) in names:
                    ours[names[node_id]].update(bundle)
    for request, name in known:
        ours[name].update({"GPU": request.gpus_per_task, "CPU": request.cpu_milli / 1000})
    found = {}
    for name, node in nodes.items():
        there, left = node["Resources"], free.get(node["NodeID"], {})
        gpus, cpus = (there.get(kind, 0) - left.get(kind, 0) - ours[name][kind] for kind in ("GPU", "CPU"))
        found[name] = math.ceil(gpus - _LITTLE), round(1000 * cpus)
    return found


def _replicas(services: Mapping[str, JobRecord], nodes: _Nodes) -> list[_There]:
    """Those of services that are up, by the names that Ray Serve gives their actors."""
    names, found = {node["NodeID"]: name for name, node in nodes.items()}, []
    for number, one in enumerate(actors().values() if services else ()):
        record = services.get(one["Name"].removeprefix("SERVE_REPLICA::").partition("-engines#")[0])
        name = names.get(one["Address"]["NodeID"])
        if record is not None and name is not None and one["State"] == "ALIVE":
            each = replica_actor(record.job)[0]
            request = JobRequest(
                f"{record.job_id} replica {number}", 1, int(each.get("num_gpus", 0)), tenant=record.job.tenant,
                cpu_milli=int(1000 * each.get("num_cpus", 0)), preemptible=False,
            )  # fmt: skip
            found.append((request, name))
    return found


def _node(name: str, node: Mapping[str, Any]) -> ClusterNode:
    there, leaf = node["Resources"], node.get("Labels", {}).get(_LEAF, "")
    kinds = [kind.removeprefix(ACCELERATOR).lower() for kind in there if kind.startswith(ACCELERATOR)]
    cpu_milli = int(1000 * there.get("CPU", 0))
    return ClusterNode(name, int(there.get("GPU", 0)), (*kinds, "")[0], cpu_milli, leaf=leaf)


class GangAttempt:
    """One start of a gang: how it ended is in its folder, and its keeper is an actor."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record

    @property
    def alive(self) -> bool:
        return not end_file(self.record).exists() and self._keeper() is not None

    @property
    def exit_code(self) -> int | None:
        return own_exit_code(self._end().get("code"))

    @property
    def lost(self) -> str:
        """A keeper that ended without a word under the same head was killed, and that counts as a failure."""
        if end := self._end():
            return str(end.get("lost", ""))
        started = _head_file(self.record)
        same = started.exists() and started.read_text("utf-8") == _head()
        return "" if same else "the Ray head is another one"

    @property
    def failed_on(self) -> Sequence[str]:
        return tuple(self._end().get("failed_on", ()))

    def ask_to_end(self) -> None:
        if (keeper := self._keeper()) is not None:
            keeper.stop.remote()

    def end(self) -> None:
        if (keeper := self._keeper()) is not None:
            ray.kill(keeper)
        remove_groups(group_name(self.record))

    def _end(self) -> dict[str, Any]:
        return read_end(end_file(self.record))

    def _keeper(self) -> Any:
        with contextlib.suppress(ValueError):
            return ray.get_actor(_keeper_name(self.record), namespace=NAMESPACE)
        return None


def _keeper_name(record: JobRecord) -> str:
    return f"cumulo-{record.key}-{record.job_id}-{record.attempt}"


def _head_file(record: JobRecord) -> Path:
    return end_file(record).with_name("head")


def _head() -> str:
    """The head under which the queue lives."""
    return str(ray.get_runtime_context().get_node_id())


def _bad_nodes(record: JobRecord) -> tuple[str, ...]:
    """Nodes on which the job's attempts failed first again and again."""
    ends = (read_end(path) for path in Path(record.folder).glob("attempt-*/end.json"))
    failures = Counter(name for end in ends for name in set(end.get("failed_on", ())))
    return tuple(sorted(name for name, count in failures.items() if count >= AVOID_AFTER))


def read_end(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found
