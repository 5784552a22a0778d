"""A gang inside a Ray cluster: a keeper, which is a detached actor for one attempt of a training job, and one actor
for each task, in the bundles of one placement group on the nodes that the queue's policy chose (`ray_queue.py`).

The keeper reserves the whole gang or nothing, starts the ranks, and writes down how the attempt ended. If it is
lost, Ray starts it again, and it plays the same attempt from the last checkpoint.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cumulo.base.files import write_whole
from cumulo.cluster.decide.recovery import UNHEALTHY
from cumulo.cluster.drivers.command import check_command, output_file, work_command
from cumulo.cluster.job_settings import DeviceGroup
from cumulo.cluster.job_store import JobRecord
from cumulo.ranks.launch import STARTER

ON_HEAD = {"node:__internal_head__": 0.001}  # what only the head has: it is lost last
_END_WITH_PARENT = (  # PR_SET_PDEATHSIG: SIGKILL
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
GROUPS = "cumulo."  # how the names of our placement groups begin
ACCELERATOR = "accelerator_type:"  # and those of Ray's resources that name a GPU
_FOLLOWS = (0, 3, -signal.SIGTERM)  # exit codes of ranks that did not fail first: 3 has lost another one
_ANSWER_S = 10.0  # a task that does not answer for so long is lost with its node
_STOP_S, _LOOK_S = 60.0, 1.0
_RESERVE_S = 60.0  # for places that were free when the policy chose them


class GangTask:
    """The ranks of one node, as processes: they end with this actor, however it ends."""

    def __init__(self, stopped: bool) -> None:
        self._stopped = stopped
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
        if self._stopped:
            return -signal.SIGTERM
        ours = os.environ | {STARTER: str(os.getpid())}
        with Path(output).open("ab") as stream:
            for environment in environments:
                process = await asyncio.create_subprocess_exec(
                    *ending_with_parent(command), cwd=folder, env=ours | environment,
                    stdin=asyncio.subprocess.DEVNULL, stdout=stream, stderr=stream,
                )  # fmt: skip
                self._processes.append(process)
        codes = await asyncio.gather(*(process.wait() for process in self._processes))
        return max(codes, key=abs)

    async def check(self, command: list[str], output: str) -> int:
        """The exit code of the quick check of this node."""
        with Path(output).open("ab") as stream:
            command = ending_with_parent(command)
            return await (await asyncio.create_subprocess_exec(*command, stdout=stream, stderr=stream)).wait()

    async def stop(self) -> None:
        """Ask the ranks to save and end."""
        self._stopped = True
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)

    async def end(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


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
        self._stopped = False
        self._tasks: list[Any] = []
        self._life = asyncio.ensure_future(self._live())

    async def stop(self) -> None:
        """Ask the gang to save and end."""
        self._stopped = True
        for task in self._tasks:
            task.stop.remote()

    async def _live(self) -> None:
        if end_file(self.record).exists():  # it was lost after the end, and Ray has started it again
            return
        try:
            end = await self._attempt()
        except ray.exceptions.RayError as error:
            end = {"lost": _first_line(error)}
        except Exception as error:  # the keeper's own fault: whoever looks must see it
            with output_file(self.record).open("a", encoding="utf-8") as stream:
                stream.write(f"error: the keeper of the job failed: {type(error).__name__}: {error}\n")
            end = {"code": 1}
        write_whole(end_file(self.record), json.dumps(end).encode())

    async def _attempt(self) -> dict[str, Any]:
        """Reserve, run, and clean up; how it ended."""
        remove_groups(group_name(self.record))  # of a keeper that was lost
        ids = {name: node["NodeID"] for name, node in nodes_by_name().items()}
        places = [place.node for place in self.record.places]
        if gone := [name for name in places if name not in ids]:
            return {"lost": f"{gone[0]} is gone"}
        gang = placement_group(
            [gang_bundle(self.record) for _ in places],
            name=group_name(self.record) + secrets.token_hex(4),
            bundle_label_selector=[{"ray.io/node-id": ids[name]} for name in places],
        )
        try:
            begin_s = time.monotonic()
            while not await asyncio.to_thread(gang.wait, _LOOK_S):
                if self._stopped:
                    return {"code": -signal.SIGTERM}
                if gone := [name for name in places if name not in nodes_by_name()]:
                    return {"lost": f"{gone[0]} is gone"}
                if time.monotonic() - begin_s > _RESERVE_S:
                    return {"lost": f"the places were not free within {_RESERVE_S:.0f} s: others use them"}
            return await self._run(gang, len(places))
        finally:
            with contextlib.suppress(TimeoutError):  # nobody is left when the next attempt begins
                await asyncio.wait_for(asyncio.gather(*map(_ended, self._tasks)), _ANSWER_S)
            for task in self._tasks:
                ray.kill(task)
            remove_placement_group(gang)

    async def _run(self, gang: PlacementGroup, tasks: int) -> dict[str, Any]:
        record, group = self.record, self.record.job.devices[0]
        actor: Any = ray.remote(GangTask)
        self._tasks = [
            actor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(gang, placement_group_bundle_index=number),
                **actor_resources(group),
            ).remote(self._stopped)
            for number in range(tasks)
        ]  # fmt: skip
        places = await asyncio.gather(*(task.where.remote() for task in self._tasks))
        if record.job.check_nodes:
            checks = [
                task.check.remote(check_command(record, "--node", place.node), str(output_file(record)))
                for task, place in zip(self._tasks, record.places, strict=True)
            ]
            if UNHEALTHY in await asyncio.gather(*checks):
                return {"code": UNHEALTHY}
        command = (work_command(record), record.working_folder, str(output_file(record)))
        runs = [
            task.run.remote(*command, _environments(group, tasks, place, places))
            for place, task in enumerate(self._tasks)
        ]
        codes = await self._codes(runs)
        if codes is None:
            return {"lost": "a node does not answer"}
        failed = [
            place.node for place, code in zip(record.places, codes, strict=True) if code not in _FOLLOWS
        ]
        return {"code": max(codes, key=abs), "failed_on": failed}

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


def write_end(record: JobRecord, state: str, reason: str) -> None:
    write_whole(Path(record.folder, "end.json"), json.dumps({"state": state, "reason": reason}).encode())


async def _result(reference: Any) -> Any:
    return await reference


async def _ended(task: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):  # it has ended with its node
        await task.end.remote()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:160]


def end_file(record: JobRecord) -> Path:
    return Path(record.folder, f"attempt-{record.attempt}", "end.json")


def group_name(record: JobRecord, attempt: str = "") -> str:
    """How the names of the attempt's placement groups begin."""
    return f"{GROUPS}{record.job_id}.{attempt or record.attempt}."


def remove_groups(name: str) -> None:
    """Remove those whose names begin so: Ray keeps them when a keeper is lost."""
    for one in placement_group_table().values():
        if one["name"].startswith(name) and one["state"] != "REMOVED":
            remove_placement_group(ray.util.get_placement_group(one["name"]))


def gang_bundle(record: JobRecord) -> dict[str, float]:
    """What Ray reserves for one task."""
    group = record.job.devices[0]
    bundle = {"CPU" if group.on_cpu else "GPU": float(group.each)}
    return bundle if group.kind in ("cpu", "gpu") else bundle | {f"{ACCELERATOR}{group.kind.upper()}": 0.001}


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


def nodes_by_name() -> dict[str, dict[str, Any]]:
    """The nodes that are alive, by their names; with the beginning of their ids where several share one."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    count = Counter(node["NodeName"] for node in alive)
    return {
        name if count[name := node["NodeName"]] == 1 else f"{name}/{node['NodeID'][:6]}": node
        for node in sorted(alive, key=lambda node: (node["NodeName"], node["NodeID"]))
    }
