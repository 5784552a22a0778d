"""How a service is divided: over how many ranks each replica goes, and so with how many devices each of its
processes is started. Every driver asks: a pod, a Slurm task and a Ray actor have as many devices as ranks.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cumulo.cluster.job_settings import JobFile
from cumulo.engine.config import EngineConfig
from cumulo.errors import ConfigError
from cumulo.plan.serve.plan_file import read_plan

_SIZES = ("tp", "pp", "dp", "ep")


@dataclass(frozen=True, slots=True)
class ServedShape:
    """How a service is divided, from its plan or its options."""

    tp: int
    pp: int
    dp: int
    ep: int
    replicas: int
    prefill: int  # engines that only compute prompts

    @property
    def ranks(self) -> int:
        """The ranks of one replica, by the engine's own rule: a device has one rank."""
        return EngineConfig(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep).layout.world

    @property
    def words(self) -> str:
        """tp=4, pp=1, and the others where they are used."""
        more = [f"{name}={getattr(self, name)}" for name in ("dp", "ep") if getattr(self, name) > 1]
        return ", ".join([f"tp={self.tp}", f"pp={self.pp}", *more])

    def missing(self, options: tuple[str, ...]) -> list[str]:
        """Options that say the sizes, as far as `options` does not."""
        found = []
        for name in _SIZES:
            value = getattr(self, name)
            if value > 1 and size_option(options, name) is None:
                found += [f"--{name}", str(value)]
        return found


def size_option(options: tuple[str, ...], name: str) -> int | None:
    """What `--tp 4` or `--tp=4` says."""
    for number, word in enumerate(options):
        option, gives, value = word.partition("=")
        if option == f"--{name}":
            text = value if gives else (options[number + 1] if number + 1 < len(options) else "")
            if not text.isdecimal() or int(text) < 1:
                raise ConfigError(f"serve.options: {option} must be a number of 1 or more, got {text!r}")
            return int(text)
    return None


def served_shape(job: JobFile) -> ServedShape:
    serve = job.serve
    assert serve is not None
    if serve.plan is not None:
        plan = read_plan(Path(serve.plan))
        shape = ServedShape(plan.tp, plan.pp, 1, plan.ep, plan.decode or plan.replicas, plan.prefill)
    else:
        tp, pp, dp, ep = (size_option(serve.options, name) or 1 for name in _SIZES)
        shape = ServedShape(tp, pp, dp, ep, serve.replicas, 0)
    return replace(shape, replicas=serve.replicas) if serve.replicas > 1 else shape


@dataclass(frozen=True, slots=True)
class ServerTasks:
    """Processes of `cumulo serve` on a cluster that starts tasks, and the devices of each."""

    servers: int
    devices: int
    per_node: int | None  # servers on each node; None: wherever they fit


def server_tasks(job: JobFile) -> ServerTasks:
    """Returns as many servers as the devices are enough for. A plan with prefill and decode apart is one
    server, which starts all of its engines."""
    shape, group = served_shape(job), job.devices[0]
    replicas = shape.replicas
    if shape.prefill:
        servers, each = 1, group.count
    elif group.on_cpu:
        servers = replicas if replicas > 1 else max(1, group.count // shape.ranks)
        each = group.count // servers
    else:
        servers, each = group.count // shape.ranks, shape.ranks
    wanted = shape.ranks * (replicas + shape.prefill)
    if each < shape.ranks or servers * each != group.count or (replicas > 1 and servers not in (replicas, 1)):
        raise ConfigError(
            f"{job.name} asks for {group.count} device{'' if group.count == 1 else 's'}, and {replicas} "
            f"replica{'' if replicas == 1 else 's'} with {shape.words} need {wanted}; set devices.count to {wanted}"
        )
    if group.per_node is not None and group.per_node % each:
        raise ConfigError(
            f"{job.name}: a server with {each} devices does not fit {group.per_node} devices of a node "
            f"(devices.per_node); use a multiple of {each}. Replicas over several nodes run --on kubernetes"
        )
    return ServerTasks(servers, each, None if group.per_node is None else group.per_node // each)


def replica_actor(job: JobFile) -> tuple[dict[str, Any], int | None]:
    """Options of its actor, and how many replicas a node may have at most; None: as many as fit. An actor lies on
    one node and has a GPU for each of the replica's ranks."""
    group, shape = job.devices[0], served_shape(job)
    if shape.prefill:
        raise ConfigError(
            f"{job.name}: prefill and decode apart are not deployed --on ray; launch it --on kubernetes or local"
        )
    devices = max(group.each, shape.ranks) if group.on_cpu else shape.ranks
    if group.per_node is not None and devices > group.per_node:
        raise ConfigError(
            f"{job.name}: a replica with {shape.words} needs {devices} devices on one node, and devices.per_node "
            f"is {group.per_node}; change tp or pp, or set devices.per_node to {devices}"
        )
    actor: dict[str, Any] = {"num_cpus": devices} if group.on_cpu else {"num_gpus": devices, "num_cpus": 0}
    if group.kind not in ("cpu", "gpu"):
        actor["resources"] = {f"accelerator_type:{group.kind.upper()}": 0.001}
    return actor, None if group.per_node is None else group.per_node // devices
