"""What one replica of a service asks Ray for. `ray.py` prints it, and the keeper of the service deploys with it."""

from typing import Any

from cumulo.cluster.job_settings import JobSettings
from cumulo.cluster.served_shape import served_shape
from cumulo.errors import ConfigError


def replica_actor(job: JobSettings) -> tuple[dict[str, Any], int | None]:
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
