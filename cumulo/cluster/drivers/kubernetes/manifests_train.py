"""Manifests of a training job: a gang of nodes under Volcano, Kueue, KubeRay or Kubernetes alone. Called by
`job_manifests`.
"""

from pathlib import Path
from typing import Any

from cumulo.cluster.drivers.kubernetes.pod_template import (
    CONFIG,
    DATA,
    MASTER_PORT,
    Body,
    filled,
    pod_template,
    queues,
    ray_pods,
)
from cumulo.cluster.job_file import JobFile
from cumulo.cluster.job_settings import seconds
from cumulo.errors import ConfigError

# By what scheduler: the name of the first pod, the variable with a pod's index, and what else its pods have.
_OF_INDEXED_JOB = "{name}-0.{name}", "$(JOB_COMPLETION_INDEX)", "Never"
_PODS = {
    "volcano": ("{name}-node-0.{name}", "$(VC_TASK_INDEX)", "OnFailure"),
    "kueue": _OF_INDEXED_JOB,
    "none": _OF_INDEXED_JOB,
}


def train_manifests(job: JobFile) -> list[Body]:
    (nodes, gpus), settings = nodes_of(job), job.kubernetes
    values: dict[str, Any] = {"nodes": nodes, "fewest": _fewest(job, nodes)}
    values["limit_s"] = job.time_limit and int(seconds(job.time_limit, "time_limit"))
    if settings.scheduler == "ray":
        return filled("train", job, **values | ray_pods(job, gpus) | {"fewest": nodes, "most": nodes})
    first, index, restart = _PODS[settings.scheduler]
    command = train_command(job, nodes, gpus or job.devices[0].each, first.format(name=job.name), index)
    indexed, leafs = settings.scheduler != "volcano", settings.scheduler == "kueue" and settings.leafs
    values["pod"] = pod_template(
        job, command, gpus, many_nodes=nodes > 1, restart=restart,
        ports={"master": MASTER_PORT} if nodes > 1 else {},
        subdomain=job.name if indexed and nodes > 1 else "",
        annotations={"kueue.x-k8s.io/podset-preferred-topology": settings.leaf_label} if leafs else {},
    )  # fmt: skip
    return [*queues(job), *filled("train", job, **values)]


def nodes_of(job: JobFile) -> tuple[int, int]:
    """How many pods, and the GPUs of each; cores count as no GPUs."""
    group = job.devices[0]
    if len(job.devices) > 1:
        raise ConfigError(f"{job.name} asks for several kinds of devices; on Kubernetes a job has one kind")
    if group.on_cpu:
        return group.tasks, 0
    each = group.per_node or min(group.count, job.kubernetes.node_gpus)
    if group.count % each:
        raise ConfigError(
            f"{job.name} asks for {group.count} GPUs on {job.kubernetes.node_gpus}-GPU nodes: one node is partly "
            f"used; ask for a multiple of {each}, or set devices.per_node to a divisor of {group.count}"
        )
    return group.count // each, each


def train_command(job: JobFile, nodes: int, ranks: int, master: str, node_rank: str) -> list[str]:
    train = job.train
    assert train is not None
    folder = f"{DATA}/runs/{job.name}" if job.kubernetes.claim else f"/tmp/{job.name}"
    work = [
        "-m", "cumulo", "train", f"{CONFIG}/{Path(str(train.source)).name}", "--folder", folder, "--resume",
        *train.options,
    ]  # fmt: skip
    if nodes * ranks == 1:
        return ["python", *work]
    if nodes == 1:
        start = ["--standalone", f"--nproc-per-node={ranks}"]
    elif _fewest(job, nodes) < nodes:  # Volcano may start fewer: who is there meets at the first pod
        start = [
            f"--nnodes={_fewest(job, nodes)}:{nodes}", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={master}:{MASTER_PORT}", f"--rdzv-id={job.name}",
            f"--max-restarts={job.restart.most}",
        ]  # fmt: skip
    else:
        start = [
            f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--node-rank={node_rank}",
            f"--master-addr={master}", f"--master-port={MASTER_PORT}", f"--max-restarts={job.restart.most}",
        ]  # fmt: skip
    return ["python", "-m", "torch.distributed.run", *start, *work]


def _fewest(job: JobFile, nodes: int) -> int:
    """Pods with which a gang may start. Only Volcano starts a part of a job's pods."""
    if job.elastic is None or job.kubernetes.scheduler != "volcano":
        return nodes
    each = nodes_of(job)[1] or job.devices[0].each
    return min(nodes, max(1, -(-job.elastic.min // each)))
