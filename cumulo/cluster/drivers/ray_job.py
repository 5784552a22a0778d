"""A training job inside a Ray cluster: a keeper, which is a detached actor with the job's key as its name, and one
actor for each task of the gang, in the bundles of one placement group.

The keeper reserves the whole gang or nothing, starts the ranks, and when a node is lost reserves again and starts
them from the last checkpoint. If the keeper's own node is lost, Ray starts it again and it does the same.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cumulo.base.files import write_whole
from cumulo.cluster.decide.jobs import TaskPlace
from cumulo.cluster.decide.recovery import AttemptEnd, after_attempt, recovery
from cumulo.cluster.drivers.command import last_error, mark_attempt, output_file, run_folder, work_command
from cumulo.cluster.job_progress import run_progress
from cumulo.cluster.job_settings import DeviceGroup
from cumulo.cluster.job_store import JobRecord

ON_HEAD = {"node:__internal_head__": 0.001}  # what only the head has: it is lost last
_END_WITH_PARENT = (  # PR_SET_PDEATHSIG: SIGKILL
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
CORDON_AFTER = 2  # failures that began on a node
_FOLLOWS = (0, 3, -signal.SIGTERM)  # exit codes of ranks that did not fail first: 3 has lost another one
_ANSWER_S = 10.0  # a task that does not answer for so long is lost with its node
_STOP_S = 60.0
_LOOK_S = 1.0


class GangTask:
    """The ranks of one node, as processes: they end with this actor, however it ends."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []

    async def where(self) -> tuple[str, str, int]:
        """Returns its node's id, its address, and a port that is free there."""
        with socket.socket() as line:
            line.bind(("", 0))
            port = line.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    async def alive(self) -> bool:
        return True

    async def run(
        self, command: list[str], folder: str, output: str, environments: list[dict[str, str]]
    ) -> int:
        """The worst exit code of its ranks."""
        with Path(output).open("ab") as stream:
            for environment in environments:
                process = await asyncio.create_subprocess_exec(
                    *ending_with_parent(command), cwd=folder, env=os.environ | environment,
                    stdin=asyncio.subprocess.DEVNULL, stdout=stream, stderr=stream,
                )  # fmt: skip
                self._processes.append(process)
        codes = await asyncio.gather(*(process.wait() for process in self._processes))
        return max(codes, key=abs)

    async def stop(self) -> None:
        """Ask the ranks to save and end."""
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)


def ending_with_parent(command: list[str]) -> list[str]:
    """A command whose process ends with the one that starts it. Without preexec_fn, which forks: threads of gRPC in
    an actor do not survive that."""
    return [
        sys.executable,
        "-S",
        "-c",
        _END_WITH_PARENT,
        shutil.which(command[0]) or command[0],
        *command[1:],
    ]


class JobKeeper:
    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.facts: dict[str, Any] = {"state": "queued", "reason": "the gang is being reserved", "places": ()}
        self._cancelled = False
        self._tasks: list[Any] = []
        self._failures: dict[str, int] = {}  # of nodes whose ranks failed first, by their id
        self._nodes: list[str] = []  # of the tasks of this attempt
        self._life = asyncio.ensure_future(self._live())

    async def look(self) -> dict[str, Any]:
        return self.facts

    async def cancel(self) -> None:
        self._cancelled = True
        self._tell(state="stopping", reason="cancelled by its user")
        for task in self._tasks:
            task.stop.remote()

    def _tell(self, **facts: Any) -> None:
        self.facts = self.facts | facts

    async def _live(self) -> None:
        try:
            tasks = self.record.job.devices[0].tasks
            while not await self._attempt(tasks):
                tasks = self._size()
        except Exception as error:  # the keeper's own fault: whoever looks must see it
            self._finish("failed", f"the keeper of the job failed: {type(error).__name__}: {error}")

    def _size(self) -> int:
        """With how many tasks to go on, as the recovery policy says; asked again while the gang waits, because Ray
        notices a lost node later than its ranks do."""
        job, group = self.record.job, self.record.job.devices[0]
        progress = run_progress(run_folder(self.record))
        fitting = _tasks_that_fit(group)
        elastic = job.elastic
        least = group.tasks if elastic is None else max(1, elastic.min // group.each)
        _, tasks, reason = recovery(
            tasks=group.tasks,
            least_tasks=least,
            fitting_tasks=fitting,
            left_s=progress.left_s,
            ways=job.restart.ways,
        )
        self._tell(reason=reason)
        return tasks

    async def _attempt(self, tasks: int) -> bool:
        """Reserve, run, and clean up; whether the job has ended."""
        bundles, strategy = gang_bundles(self.record, tasks)
        gang = placement_group(bundles, strategy, bundle_label_selector=self._avoiding(tasks))
        try:
            while not await asyncio.to_thread(gang.wait, _LOOK_S):
                self._tell(state="queued", places=(), reason=_why_not(self.record.job.devices[0], tasks))
                if self._cancelled:
                    return self._finish("cancelled", "cancelled before it started")
                if self.record.job.elastic is not None and self._size() != tasks:
                    return False
            return await self._run(gang, tasks)
        finally:
            for task in self._tasks:
                ray.kill(task)
            self._tasks = []
            remove_placement_group(gang)

    async def _run(self, gang: PlacementGroup, tasks: int) -> bool:
        record, group = self.record, self.record.job.devices[0]
        actor: Any = ray.remote(GangTask)
        self._tasks = [
            actor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(gang, placement_group_bundle_index=number),
                **actor_resources(group),
            ).remote()
            for number in range(tasks)
        ]  # fmt: skip
        first_step = run_progress(run_folder(record)).step
        number = self.facts.get("attempt", 0) + 1
        mark_attempt(output_file(record), number)
        try:
            places = await asyncio.gather(*(task.where.remote() for task in self._tasks))
            self._nodes = [node for node, _, _ in places]
            shown = tuple(TaskPlace(name) for name in node_names(self._nodes))
            self._tell(state="running", places=shown, reason="its whole gang is reserved", attempt=number)
            command = (work_command(record), record.working_folder, str(output_file(record)))
            runs = [
                task.run.remote(*command, _environments(group, tasks, place, places))
                for place, task in enumerate(self._tasks)
            ]
            codes = await self._codes(runs)
        except ray.exceptions.RayError as error:
            return self._node_lost(str(error).splitlines()[0])
        if codes is None:
            return self._node_lost("a node does not answer")
        return self._after(codes, first_step)

    async def _codes(self, runs: list[Any]) -> list[int] | None:
        """Exit codes of all tasks; None: one of them is lost with its node."""
        tasks = [asyncio.ensure_future(_result(run)) for run in runs]
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(one.exception() is not None or one.result() != 0 for one in done):
                # One rank has failed, and the others follow; is it a node that is gone?
                answers = await asyncio.gather(
                    *(asyncio.wait_for(_result(task.alive.remote()), _ANSWER_S) for task in self._tasks),
                    return_exceptions=True,
                )
                if any(isinstance(answer, BaseException) for answer in answers):
                    return None
                await asyncio.wait(tasks, timeout=_STOP_S)
                break
        return [one.result() if one.done() and not one.exception() else 1 for one in tasks]

    def _avoiding(self, tasks: int) -> list[dict[str, str]] | None:
        """Nodes that failed again and again are cordoned for this job, as the cluster's own policies do."""
        bad = [name for name, failures in self._failures.items() if failures >= CORDON_AFTER]
        return [{"ray.io/node-id": f"!in({', '.join(bad)})"}] * tasks if bad else None

    def _node_lost(self, how: str) -> bool:
        if self._cancelled:
            return self._finish("cancelled", "cancelled by its user")
        step = run_progress(run_folder(self.record)).step
        self._tell(state="queued", places=(), reason=f"a node was lost after step {step} ({how})")
        return False

    def _after(self, codes: list[int], first_step: int) -> bool:
        if self._cancelled:
            return self._finish("cancelled", "cancelled by its user; a training run keeps its checkpoint")
        progress = run_progress(run_folder(self.record))
        error = last_error(output_file(self.record))
        end = AttemptEnd(max(codes, key=abs), progress.finished, progress.step, first_step, error)
        failures = self.facts.get("failures", 0)
        after = after_attempt(end, failures, self.record.job.restart.most)
        for node, code in zip(self._nodes, codes, strict=True):
            if code not in _FOLLOWS:
                self._failures[node] = self._failures.get(node, 0) + 1
        self._tell(failures=failures + after.counts, reason=after.reason)
        if after.state == "again":
            self._tell(state="queued", places=())
            return False
        return self._finish(after.state, after.reason)

    def _finish(self, state: str, reason: str) -> bool:
        self._tell(state=state, places=(), reason=reason)
        write_end(self.record, state, reason)
        return True


def write_end(record: JobRecord, state: str, reason: str) -> None:
    write_whole(Path(record.folder, "end.json"), json.dumps({"state": state, "reason": reason}).encode())


async def _result(reference: Any) -> Any:
    return await reference


def gang_bundles(record: JobRecord, tasks: int) -> tuple[list[dict[str, float]], str]:
    group = record.job.devices[0]
    strategy = record.job.ray.strategy or ("STRICT_SPREAD" if group.per_node else "PACK")
    kind = {"CPU": group.each} if group.on_cpu else {"GPU": group.each, "CPU": 0.0}
    bundle = {name: float(amount) for name, amount in kind.items() if amount}
    if group.kind not in ("cpu", "gpu"):
        bundle[f"accelerator_type:{group.kind.upper()}"] = 0.001
    return [dict(bundle) for _ in range(tasks)], strategy


def actor_resources(group: DeviceGroup) -> dict[str, Any]:
    return {"num_cpus": group.each} if group.on_cpu else {"num_gpus": group.each, "num_cpus": 0}


def _environments(
    group: DeviceGroup, tasks: int, place: int, places: list[tuple[str, str, int]]
) -> list[dict[str, str]]:
    """The variables of each rank of a task, as torchrun would set them."""
    _, address, port = places[0]
    return [
        {
            "RANK": str(place * group.each + local),
            "WORLD_SIZE": str(tasks * group.each),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(group.each),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        for local in range(group.each)
    ]


def _tasks_that_fit(group: DeviceGroup) -> int:
    """How many tasks fit the nodes that are alive, whoever uses them now."""
    name = "CPU" if group.on_cpu else "GPU"
    alive = [node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]]
    if group.per_node:
        return sum(amount >= group.each for amount in alive)
    return int(sum(alive)) // group.each


def _why_not(group: DeviceGroup, tasks: int) -> str:
    name = "CPU" if group.on_cpu else "GPU"
    free = ray.available_resources().get(name, 0)
    total = ray.cluster_resources().get(name, 0)
    return (
        f"the gang needs {tasks} bundles of {group.each} {name} at once; the cluster has {total:g} {name}, "
        f"{free:g} of them free"
    )


def node_names(node_ids: list[str]) -> list[str]:
    """Nodes by their address; with the beginning of their id where several share one."""
    known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    shared = len(set(known.values())) < len(known)
    return [
        f"{known.get(name, '?')}/{name[:6]}" if shared else known.get(name, name[:6]) for name in node_ids
    ]
