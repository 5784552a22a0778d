"""The pods of a job: command, GPUs, NCCL and RDMA, shared memory, secrets, probes, graceful drain. Used by all
manifests.
"""

from collections.abc import Sequence
from typing import Any

from cumulo.cluster.drivers.kubernetes.pods import quantity
from cumulo.cluster.job_file import JobFile
from cumulo.cluster.job_settings import KubernetesSettings, seconds
from cumulo.cluster.served_shape import served_shape

PORT, RANK_PORT, TRANSFER_PORT, MASTER_PORT = 8000, 9100, 9200, 29500
DRAIN_S = 60  # for running requests, after a pod was told to stop
_GONE_S = 5  # until no Service sends requests to a pod that stops
_START_S, _PROBE_S = 1800, 10  # to load a model; between two probes
_SHARED_MIB = 16 << 10  # of /dev/shm, at most
CONFIG, DATA, KEYS = "/etc/cumulo", "/data", "/etc/cumulo-keys"
Body = dict[str, Any]


def manifest(kind: str, named: Body, **spec: Any) -> Body:
    """An object: `kind` is its API version and kind, `named` its metadata."""
    api_version, _, name = kind.rpartition("/")
    return {"apiVersion": api_version, "kind": name, "metadata": named, "spec": spec}


def service(
    job: JobFile, part: str, port: str, number: int, selects: dict[str, str] | None = None, **more: Any
) -> Body:
    """A Service before the pods of a part, at one of their named ports."""
    ports = [{"name": port, "port": number, "targetPort": port}]
    selector = labels_of(job, part) if selects is None else selects
    return manifest("v1/Service", metadata(job, part), **more, selector=selector, ports=ports)


def metadata(job: JobFile, part: str = "", **labels: str) -> Body:
    """The metadata of an object of the job; its labels select its pods."""
    name = f"{job.name}-{part}" if part else job.name
    return {"name": name, "namespace": job.kubernetes.namespace, "labels": labels_of(job, part) | labels}


def labels_of(job: JobFile, part: str = "") -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "cumulo",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": part or job.kind,
        "cumulo.dev/tenant": job.tenant,
    }


def secret_name(job: JobFile) -> str:
    return job.kubernetes.secret or f"{job.name}-keys"


def pod_template(
    job: JobFile,
    command: Sequence[str],
    gpus: int,
    *,
    part: str = "",
    serves: bool = False,
    many_nodes: bool = False,
    env: Sequence[Body] = (),
    ports: Sequence[Body] = (),
    restart: str | None = None,
) -> Body:
    """`part`: which of the job's pods; `serves`: it answers HTTP; `many_nodes`: NCCL crosses nodes."""
    container: Body = {
        "name": "cumulo",
        "image": job.kubernetes.image,
        "command": list(command),
        "env": [*_nccl(job.kubernetes, gpus, many_nodes), *_keys(job, serves), *env],
        "resources": resources(job, gpus, many_nodes),
        "volumeMounts": _mounts(job),
    }
    if serves:
        container |= {"ports": [{"name": "http", "containerPort": PORT}, *ports], **_probes()}
    elif ports:
        container["ports"] = list(ports)
    if job.kubernetes.rdma and many_nodes:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA pins memory
    spec: Body = {
        "containers": [container],
        "volumes": _volumes(job, container["resources"]["limits"]["memory"]),
        "terminationGracePeriodSeconds": _grace_s(job, serves),
    }
    if restart is not None:
        spec["restartPolicy"] = restart
    if job.kubernetes.node_labels:
        spec["nodeSelector"] = dict(job.kubernetes.node_labels)
    if gpus:
        key = job.kubernetes.gpu_resource
        spec["tolerations"] = [{"key": key, "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": labels_of(job, part)}, "spec": spec}


def resources(job: JobFile, gpus: int, many_nodes: bool = False) -> Body:
    settings = job.kubernetes
    if not gpus:
        asked: Body = {"cpu": str(_cores(job)), "memory": _memory(job)}
        return {"requests": asked, "limits": dict(asked)}
    limits: Body = {
        "cpu": str(settings.cpus_per_gpu * gpus),
        "memory": times(gpus, settings.memory_per_gpu),
        settings.gpu_resource: gpus,
    }
    if settings.rdma and many_nodes:
        limits[settings.rdma] = 1
    return {"requests": dict(limits), "limits": limits}


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


def _nccl(settings: KubernetesSettings, gpus: int, many_nodes: bool) -> list[Body]:
    if not gpus:
        return []
    given = {"NCCL_DEBUG": "WARN"}
    if many_nodes:
        given["NCCL_SOCKET_IFNAME"] = "eth0"  # the pod's own; start-up goes over it
        if settings.rdma:
            given["NCCL_IB_DISABLE"] = "0"
            given["NCCL_NET_GDR_LEVEL"] = "PHB"  # the NIC reads GPU memory where both hang on one host bridge
        else:
            given["NCCL_IB_DISABLE"] = "1"
    return [{"name": name, "value": value} for name, value in (given | dict(settings.nccl)).items()]


def fleet_key(job: JobFile) -> list[Body]:
    """What servers and gateways of one fleet know each other by."""
    return [_from_secret(job, "CUMULO_FLEET_KEY", "fleet-key")]


def _from_secret(job: JobFile, variable: str, key: str, optional: bool = False) -> Body:
    ref: Body = {"name": secret_name(job), "key": key}
    return {"name": variable, "valueFrom": {"secretKeyRef": ref | ({"optional": True} if optional else {})}}


def _keys(job: JobFile, serves: bool) -> list[Body]:
    token = _from_secret(job, "HF_TOKEN", "hf-token", optional=True)
    return [*fleet_key(job), token] if serves else [token]


def _mounts(job: JobFile) -> list[Body]:
    mounts: list[Body] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if has_config(job):
        mounts.append({"name": "config", "mountPath": CONFIG, "readOnly": True})
    if job.kubernetes.claim:
        mounts.append({"name": "data", "mountPath": DATA})
    if job.kubernetes.api_keys and job.serve is not None:
        mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
    return mounts


def _volumes(job: JobFile, memory: str) -> list[Body]:
    """Shared memory is memory of the container: half of it at most."""
    half_mib = int((quantity(memory) or 0.0) / 2 / 2**20)
    shared = "16Gi" if half_mib >= _SHARED_MIB else f"{half_mib}Mi"
    volumes: list[Body] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared}}]
    if has_config(job):
        volumes.append({"name": "config", "configMap": {"name": f"{job.name}-config"}})
    if job.kubernetes.claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": job.kubernetes.claim}})
    if job.kubernetes.api_keys and job.serve is not None:
        items = [{"key": "api-keys", "path": "api-keys"}]
        volumes.append({"name": "keys", "secret": {"secretName": secret_name(job), "items": items}})
    return volumes


def has_config(job: JobFile) -> bool:
    return config_source(job) is not None


def config_source(job: JobFile) -> str | None:
    """The file of this machine that the pods read."""
    if job.train is not None:
        return job.train.source
    assert job.serve is not None
    return job.serve.plan


def _grace_s(job: JobFile, serves: bool) -> int:
    return DRAIN_S + _GONE_S + 10 if serves else int(seconds(job.save_before, "save_before")) + 10


def _probes() -> Body:
    """/ready: requests are taken. /health: the engine finishes steps, not only that a port is open."""
    ready, health = ({"path": path, "port": "http"} for path in ("/ready", "/health"))
    return {
        "startupProbe": {
            "httpGet": ready, "periodSeconds": _PROBE_S, "failureThreshold": _START_S // _PROBE_S,
        },
        "readinessProbe": {"httpGet": dict(ready), "periodSeconds": 5, "failureThreshold": 2, "timeoutSeconds": 3},
        "livenessProbe": {"httpGet": health, "periodSeconds": _PROBE_S, "failureThreshold": 6, "timeoutSeconds": 5},
        # Services forget the pod first; then SIGTERM, on which the server finishes what runs.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_GONE_S)]}}},
    }  # fmt: skip
