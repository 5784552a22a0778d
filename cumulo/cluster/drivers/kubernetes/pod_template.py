"""The pods of a job, and how its objects are made: `templates/`, filled in with the job's settings. Used by all
manifests.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cumulo.cluster.drivers.kubernetes.pods import quantity
from cumulo.cluster.job_file import JobFile
from cumulo.cluster.job_settings import KubernetesSettings, seconds
from cumulo.cluster.served_shape import served_shape

PORT, RANK_PORT, TRANSFER_PORT, MASTER_PORT, SCALER_PORT = 8000, 9100, 9200, 29500, 9090
DRAIN_S = 60  # for running requests, after a pod was told to stop
_GONE_S = 5  # until no Service sends requests to a pod that stops
_SHARED_MIB = 16 << 10  # of /dev/shm, at most
CONFIG, DATA, KEYS = "/etc/cumulo", "/data", "/etc/cumulo-keys"
Body = dict[str, Any]
_NO_YAML = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")  # what YAML takes as an escape only


def filled(template: str, job: JobFile, **values: Any) -> list[Body]:
    """The objects of a template. Every value stands in it as JSON: no text of a job file is read as YAML."""
    text = (
        _templates()
        .get_template(f"{template}.yaml.j2")
        .render(
            job=job,
            settings=job.kubernetes,
            queue=queue_name(job),
            secret=secret_name(job),
            labels=lambda part="": labels_of(job, part),
            metadata=lambda part="": metadata(job, part),
            workload=lambda part="": _workload(job, part),
            **values,
        )
    )
    found = yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [body for body in found if body is not None]


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), finalize=_as_json, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, autoescape=False,
    )  # fmt: skip
    made.globals |= {
        "CONFIG": CONFIG, "DATA": DATA, "KEYS": KEYS, "GONE_S": _GONE_S, "PORT": PORT, "MASTER_PORT": MASTER_PORT,
        "TRANSFER_PORT": TRANSFER_PORT, "SCALER_PORT": SCALER_PORT,
    }  # fmt: skip
    return made


def _as_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return _NO_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def metadata(job: JobFile, part: str = "") -> Body:
    """The metadata of an object of the job; its labels select its pods."""
    name = f"{job.name}-{part}" if part else job.name
    return {"name": name, "namespace": job.kubernetes.namespace, "labels": labels_of(job, part)}


def _workload(job: JobFile, part: str) -> Body:
    """The metadata of an object that has pods, which Kueue admits by its queue."""
    made = metadata(job, part)
    if job.kubernetes.scheduler == "kueue":
        made["labels"]["kueue.x-k8s.io/queue-name"] = queue_name(job)
    return made


def labels_of(job: JobFile, part: str = "") -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "cumulo",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": part or job.kind,
        "cumulo.dev/tenant": job.tenant,
    }


def secret_name(job: JobFile) -> str:
    return job.kubernetes.secret or f"{job.name}-keys"


def queue_name(job: JobFile) -> str:
    return job.kubernetes.queue or job.tenant


def queues(job: JobFile) -> list[Body]:
    """The queue of Volcano or Kueue, where the job file has a quota for it."""
    settings = job.kubernetes
    if settings.quota is None or settings.scheduler not in ("volcano", "kueue"):
        return []
    quotas = {
        "cpu": settings.quota * settings.cpus_per_gpu,
        "memory": times(settings.quota, settings.memory_per_gpu),
        settings.gpu_resource: settings.quota,
    }
    return filled("queues", job, quotas=quotas | ({settings.rdma: settings.quota} if settings.rdma else {}))


def pod_template(
    job: JobFile,
    command: Sequence[str],
    gpus: int,
    *,
    name: str = "cumulo",
    part: str = "",
    serves: bool = False,
    in_fleet: bool = False,
    many_nodes: bool = False,
    ports: Mapping[str, int] | None = None,
    restart: str = "",
    volcano: bool = False,
    subdomain: str = "",
    annotations: Mapping[str, str] | None = None,
) -> Body:
    """`part`: which of the job's pods; `serves`: it answers HTTP; `in_fleet`: it has the key of the fleet;
    `many_nodes`: NCCL crosses nodes."""
    amounts = _amounts(job, gpus, many_nodes)
    (made,) = filled(
        "pod", job, command=list(command), gpus=gpus, name=name, part=part, serves=serves, many_nodes=many_nodes,
        restart=restart, volcano=volcano, subdomain=subdomain, annotations=annotations, amounts=amounts,
        in_fleet=in_fleet or serves, ports=({"http": PORT} if serves else {}) | dict(ports or {}),
        nccl=_nccl(job.kubernetes, many_nodes) if gpus else {}, config=config_source(job) is not None,
        keys=job.kubernetes.api_keys and job.serve is not None, grace_s=_grace_s(job, serves),
        shared_memory=_shared_memory(amounts["memory"]),
    )  # fmt: skip
    return made


def ray_pods(job: JobFile, gpus: int, in_fleet: bool = False) -> dict[str, Body]:
    """The pods of a Ray cluster, in which KubeRay starts Ray itself."""
    counts = (("head", 0), ("worker", gpus))
    return {
        part: pod_template(job, [], count, name=f"ray-{part}", part=part, in_fleet=in_fleet)
        for part, count in counts
    }


def _amounts(job: JobFile, gpus: int, many_nodes: bool) -> Body:
    """What one pod asks for, which is also all that it gets."""
    settings = job.kubernetes
    if not gpus:
        return {"cpu": str(_cores(job)), "memory": _memory(job)}
    found: Body = {
        "cpu": str(settings.cpus_per_gpu * gpus),
        "memory": times(gpus, settings.memory_per_gpu),
        settings.gpu_resource: gpus,
    }
    return found | ({settings.rdma: 1} if settings.rdma and many_nodes else {})


def times(count: int, amount: str) -> str:
    """An amount such as 64Gi, multiplied by a count."""
    number = amount.rstrip("KMGTi")
    return f"{count * int(number)}{amount.removeprefix(number)}"


def _cores(job: JobFile) -> int:
    """The cores of one pod: one for each rank that it starts."""
    group = job.devices[0]
    if job.serve is None or not group.on_cpu:
        return group.each
    ranks = served_shape(job).ranks
    return max(group.each, ranks if group.per_node is None else min(ranks, group.per_node))


def _memory(job: JobFile) -> str:
    group = job.devices[0]
    return f"{group.memory_mib * _cores(job)}Mi" if group.memory else "4Gi"


def _shared_memory(memory: str) -> str:
    """Shared memory is memory of the container: half of it at most."""
    half_mib = int((quantity(memory) or 0.0) / 2 / 2**20)
    return "16Gi" if half_mib >= _SHARED_MIB else f"{half_mib}Mi"


def _nccl(settings: KubernetesSettings, many_nodes: bool) -> dict[str, str]:
    given = {"NCCL_DEBUG": "WARN"}
    if many_nodes:
        given["NCCL_SOCKET_IFNAME"] = "eth0"  # the pod's own; start-up goes over it
        given["NCCL_IB_DISABLE"] = "0" if settings.rdma else "1"
        if settings.rdma:
            given["NCCL_NET_GDR_LEVEL"] = "PHB"  # the NIC reads GPU memory where both hang on one host bridge
    return given | dict(settings.nccl)


def config_source(job: JobFile) -> str | None:
    """The file of this machine that the pods read."""
    if job.train is not None:
        return job.train.source
    assert job.serve is not None
    return job.serve.plan


def _grace_s(job: JobFile, serves: bool) -> int:
    return DRAIN_S + _GONE_S + 10 if serves else int(seconds(job.save_before, "save_before")) + 10
