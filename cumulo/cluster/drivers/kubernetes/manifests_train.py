"""Manifests of a training job: a gang of nodes under Volcano, Kueue, KubeRay or Kubernetes alone; queues and the
shape of the network, where a job file has a quota or leafs. Called by `job_manifests`.
"""

from pathlib import Path
from typing import Any

from cumulo.cluster.drivers.kubernetes.pod_template import (
    CONFIG,
    DATA,
    MASTER_PORT,
    Body,
    labels_of,
    manifest,
    metadata,
    pod_template,
    times,
)
from cumulo.cluster.job_file import JobFile
from cumulo.cluster.job_settings import seconds
from cumulo.errors import ConfigError


def train_manifests(job: JobFile) -> list[Body]:
    makers = {"volcano": _volcano, "kueue": _kueue, "ray": _ray, "none": _plain}
    return makers[job.kubernetes.scheduler](job)


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


def _template(job: JobFile, master: str, node_rank: str, **more: Any) -> tuple[int, Body]:
    nodes, gpus = nodes_of(job)
    ranks = gpus or job.devices[0].each
    ports = [{"name": "master", "containerPort": MASTER_PORT}] if nodes > 1 else []
    command = train_command(job, nodes, ranks, master, node_rank)
    return nodes, pod_template(job, command, gpus, many_nodes=nodes > 1, ports=ports, **more)


def _volcano(job: JobFile) -> list[Body]:
    """Volcano gives pods stable names (plugin svc) and their index (plugin env)."""
    nodes, template = _template(job, f"{job.name}-node-0.{job.name}", "$(VC_TASK_INDEX)", restart="OnFailure")
    spec: Body = {
        "schedulerName": "volcano",
        "queue": queue_name(job),
        "minAvailable": _fewest(job, nodes),
        "maxRetry": job.restart.most,
        "plugins": {"svc": [], "env": []},
        "policies": [
            {"event": "PodEvicted", "action": "RestartJob"},
            {"event": "PodFailed", "action": "RestartJob"},
            {"event": "TaskCompleted", "action": "CompleteJob"},
        ],
        "tasks": [{"name": "node", "replicas": nodes, "template": template}],
    }
    if job.kubernetes.leafs:
        spec["networkTopology"] = {"mode": "soft", "highestTierAllowed": 1}
    made = manifest("batch.volcano.sh/v1alpha1/Job", metadata(job), **spec)
    return [*volcano_queue(job), *hypernodes(job), made]


def _indexed_job(job: JobFile) -> tuple[Body, Body]:
    """A Job whose pods know their index, and the Service that gives them names."""
    rank = "$(JOB_COMPLETION_INDEX)"
    nodes, template = _template(job, f"{job.name}-0.{job.name}", rank, restart="Never")
    if nodes > 1:
        template["spec"]["subdomain"] = job.name
    spec: Body = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": job.restart.most * nodes,
        "template": template,
    }
    if job.time_limit is not None:
        spec["activeDeadlineSeconds"] = int(seconds(job.time_limit, "time_limit"))
    named = manifest(
        "v1/Service",
        metadata(job),
        clusterIP="None",
        publishNotReadyAddresses=True,
        selector=labels_of(job),
        ports=[{"name": "master", "port": MASTER_PORT}],
    )
    return manifest("batch/v1/Job", metadata(job), **spec), named


def _plain(job: JobFile) -> list[Body]:
    made, service = _indexed_job(job)
    return [service, made] if made["spec"]["completions"] > 1 else [made]


def _kueue(job: JobFile) -> list[Body]:
    """Kueue starts the suspended job when all its pods have a place."""
    made, service = _indexed_job(job)
    made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = queue_name(job)
    made["spec"]["suspend"] = True
    if job.kubernetes.leafs:
        wanted = {"kueue.x-k8s.io/podset-preferred-topology": job.kubernetes.leaf_label}
        made["spec"]["template"]["metadata"]["annotations"] = wanted
    services = [service] if made["spec"]["completions"] > 1 else []
    return [*kueue_queues(job), *services, made]


def _ray(job: JobFile) -> list[Body]:
    """A Ray cluster of the job's own, which ends with it. Inside, Cumulo's Ray driver places the ranks."""
    nodes, gpus = nodes_of(job)
    spec: Body = {
        "entrypoint": f"cumulo launch {CONFIG}/job.yaml --on ray --wait",
        "shutdownAfterJobFinishes": True,
        "backoffLimit": job.restart.most,
        "rayClusterSpec": ray_cluster(job, nodes, gpus, nodes, nodes),
    }
    if job.time_limit is not None:
        spec["activeDeadlineSeconds"] = int(seconds(job.time_limit, "time_limit"))
    return [manifest("ray.io/v1/RayJob", metadata(job), **spec)]


def ray_cluster(job: JobFile, nodes: int, gpus: int, fewest: int, most: int) -> Body:
    """A head without GPUs, and the workers."""
    head, worker = (
        pod_template(job, [], count, part=part) for count, part in ((0, "head"), (gpus, "worker"))
    )
    for template, name in ((head, "ray-head"), (worker, "ray-worker")):
        template["spec"]["containers"][0]["name"] = name
        del template["spec"]["containers"][0]["command"]  # KubeRay starts Ray itself
    return {
        "enableInTreeAutoscaling": most > fewest,
        "headGroupSpec": {"rayStartParams": {"num-gpus": "0"}, "template": head},
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": nodes,
                "minReplicas": fewest,
                "maxReplicas": most,
                "rayStartParams": {},
                "template": worker,
            }
        ],
    }


# -- queues and the shape of the network --------------------------------------------------------------------
def queue_name(job: JobFile) -> str:
    return job.kubernetes.queue or job.tenant


def volcano_queue(job: JobFile) -> list[Body]:
    settings = job.kubernetes
    if settings.quota is None:
        return []
    named, limit = {"name": queue_name(job)}, {settings.gpu_resource: settings.quota}
    kind = "scheduling.volcano.sh/v1beta1/Queue"
    return [manifest(kind, named, weight=1, reclaimable=True, capability=limit)]


def hypernodes(job: JobFile) -> list[Body]:
    """One for each leaf switch, and one above them."""
    settings = job.kubernetes
    leafs = [
        _hypernode(
            f"leaf-{leaf}",
            1,
            [{"type": "Node", "selector": {"labelMatch": {"matchLabels": {settings.leaf_label: leaf}}}}],
        )
        for leaf in settings.leafs
    ]
    if len(leafs) < 2:
        return leafs
    members = [
        {"type": "HyperNode", "selector": {"exactMatch": {"name": one["metadata"]["name"]}}} for one in leafs
    ]
    return [*leafs, _hypernode("spine", 2, members)]


def _hypernode(name: str, tier: int, members: list[Body]) -> Body:
    return manifest("topology.volcano.sh/v1alpha1/HyperNode", {"name": name}, tier=tier, members=members)


def kueue_queues(job: JobFile) -> list[Body]:
    """The tenant's LocalQueue over a ClusterQueue with the quota."""
    settings, name = job.kubernetes, queue_name(job)
    if settings.quota is None:
        return []
    flavor: Body = {"nodeLabels": dict(settings.node_labels) or {"cumulo.dev/gpu": "true"}}
    topology: list[Body] = []
    if settings.leafs:
        flavor["topologyName"] = f"{name}-fabric"
        levels = [{"nodeLabel": settings.leaf_label}, {"nodeLabel": "kubernetes.io/hostname"}]
        topology = [_of_kueue("Topology", f"{name}-fabric", {"levels": levels})]
    gpu: Body = {"name": settings.gpu_resource, "nominalQuota": settings.quota}
    cpu = {"name": "cpu", "nominalQuota": settings.quota * settings.cpus_per_gpu}
    memory = {"name": "memory", "nominalQuota": times(settings.quota, settings.memory_per_gpu)}
    quotas: list[Body] = [cpu, memory, gpu]
    if settings.rdma:
        quotas.append({"name": settings.rdma, "nominalQuota": settings.quota})
    group = {
        "coveredResources": [one["name"] for one in quotas],
        "flavors": [{"name": f"{name}-gpus", "resources": quotas}],
    }
    local = _of_kueue("LocalQueue", name, {"clusterQueue": f"{name}-quota"})
    local["metadata"]["namespace"] = settings.namespace
    return [
        *topology,
        _of_kueue("ResourceFlavor", f"{name}-gpus", flavor),
        _of_kueue("ClusterQueue", f"{name}-quota", {"namespaceSelector": {}, "resourceGroups": [group]}),
        local,
    ]


def _of_kueue(kind: str, name: str, spec: Body) -> Body:
    return manifest(f"kueue.x-k8s.io/v1beta2/{kind}", {"name": name}, **spec)
