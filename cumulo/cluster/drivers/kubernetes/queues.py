"""Queues and the shape of the network, for Volcano and Kueue. Written where a job file has a quota or leafs."""

from cumulo.cluster.drivers.kubernetes.pod_template import Body, manifest, times
from cumulo.cluster.job_file import JobFile


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
        topology = [_kueue("Topology", f"{name}-fabric", {"levels": levels})]
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
    local = _kueue("LocalQueue", name, {"clusterQueue": f"{name}-quota"})
    local["metadata"]["namespace"] = settings.namespace
    return [
        *topology,
        _kueue("ResourceFlavor", f"{name}-gpus", flavor),
        _kueue("ClusterQueue", f"{name}-quota", {"namespaceSelector": {}, "resourceGroups": [group]}),
        local,
    ]


def _kueue(kind: str, name: str, spec: Body) -> Body:
    return manifest(f"kueue.x-k8s.io/v1beta2/{kind}", {"name": name}, **spec)
