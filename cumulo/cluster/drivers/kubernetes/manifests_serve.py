"""Manifests of a service: replicas on one node (Deployment) or over several (LeaderWorkerSet), prefill and decode
apart, KubeRay's RayService; with Service, probes, autoscaler, disruption budget and monitor. Called by
`job_manifests`.
"""

from pathlib import Path

import yaml

from cumulo.cluster.drivers.kubernetes.manifests_train import (
    kueue_queues,
    queue_name,
    ray_cluster,
    volcano_queue,
)
from cumulo.cluster.drivers.kubernetes.pod_template import (
    DATA,
    DRAIN_S,
    KEYS,
    PORT,
    RANK_PORT,
    TRANSFER_PORT,
    Body,
    fleet_key,
    labels_of,
    manifest,
    metadata,
    pod_template,
    service,
)
from cumulo.cluster.drivers.kubernetes.scaling import autoscaler
from cumulo.cluster.job_file import JobFile
from cumulo.cluster.job_settings import ServeWork
from cumulo.cluster.served_shape import ServedShape, served_shape
from cumulo.errors import ConfigError

_PICKER_PORT = 9002  # where endpoint pickers of the Gateway API listen


def _node_devices(job: JobFile) -> int | None:
    """Devices of one pod at most; None: a pod has as many cores as it wants."""
    return job.devices[0].per_node if job.devices[0].on_cpu else job.kubernetes.node_gpus


def _check(job: JobFile, shape: ServedShape) -> None:
    group, node = job.devices[0], _node_devices(job)
    if node is not None and shape.ranks > node and shape.ranks % node:
        raise ConfigError(
            f"{job.name}: a replica with {shape.words} has {shape.ranks} ranks, no multiple of the {node} "
            f"{'cores' if group.on_cpu else 'GPUs'} of a node: its last node is partly used; change tp or pp"
        )
    if node is not None and shape.ranks > node and (shape.prefill or job.kubernetes.scheduler == "ray"):
        what = "a replica of a RayService" if not shape.prefill else "an engine of a plan with prefill apart"
        raise ConfigError(
            f"{job.name}: {what} lies on one node of {node}, and {shape.words} needs {shape.ranks}"
        )
    if group.on_cpu:
        return
    node = job.kubernetes.node_gpus
    wanted = shape.ranks * (shape.replicas + shape.prefill)
    if group.count != wanted:
        what = f"{shape.replicas + shape.prefill} engines with {shape.words} need {wanted}"
        half = f": one {node}-GPU node is partly used" if group.count % node else ""
        raise ConfigError(
            f"{job.name} asks for {group.count} GPUs and {what}{half}; set devices.count to {wanted}"
        )
    if shape.tp > node:
        raise ConfigError(f"{job.name}: tp={shape.tp} crosses nodes of {node} GPUs; use pp for that")


def serve_manifests(job: JobFile) -> list[Body]:
    shape = served_shape(job)
    _check(job, shape)
    on_gpu = not job.devices[0].on_cpu
    if job.kubernetes.scheduler == "ray":
        return _ray(job, shape, on_gpu)
    queues = volcano_queue(job) if job.kubernetes.scheduler == "volcano" else []
    queues = kueue_queues(job) if job.kubernetes.scheduler == "kueue" else queues
    workloads: list[Body]
    each = _node_devices(job)
    if each is not None and shape.ranks > each:
        workloads = _leader_worker(job, shape, each)
    elif shape.prefill:
        workloads = [*_prefill(job, shape, on_gpu), _deployment(job, shape, on_gpu, "decode")]
    else:
        workloads = [_deployment(job, shape, on_gpu, "")]
    return [*queues, *workloads, *_around(job, workloads[-1])]


def server_command(job: JobFile, shape: ServedShape, *more: str) -> list[str]:
    serve = job.serve
    assert serve is not None
    options = [*serve.options, *shape.missing(serve.options)]
    keys = ["--api-keys", f"{KEYS}/api-keys"] if job.kubernetes.api_keys else []
    return [
        "cumulo", "serve", *_model_argument(job), "--host", "0.0.0.0", "--port", str(PORT), "--allow-host", "*",
        "--drain-timeout", str(DRAIN_S), "--no-console", *keys, *options, *more,
    ]  # fmt: skip


def _model_argument(job: JobFile) -> list[str]:
    assert job.serve is not None
    path = model_path(job, job.serve)
    return [path] if path else []


def model_path(job: JobFile, serve: ServeWork) -> str:
    """A folder of this machine is on the volume in the cluster."""
    model = serve.model
    if serve.plan is not None:
        model = yaml.safe_load(Path(serve.plan).read_text("utf-8")).get("model")
    if model and Path(model).is_absolute():
        return f"{DATA}/models/{Path(model).name}" if job.kubernetes.claim else model
    return model or ""


def _admission(job: JobFile, body: Body) -> Body:
    if job.kubernetes.scheduler == "kueue":
        body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = queue_name(job)
    return body


def _deployment(job: JobFile, shape: ServedShape, on_gpu: bool, part: str) -> Body:
    more: list[str] = []
    if part == "decode":
        more = ["--role", "decode"]
        for number in range(shape.prefill):
            peer = f"{job.name}-prefill-{number}.{job.name}-prefill"
            more += ["--prefill-engine", f"tcp:{peer}:{TRANSFER_PORT}"]
    gpus = shape.ranks if on_gpu else 0
    many = bool(part)
    template = pod_template(
        job, server_command(job, shape, *more), gpus, part=part, serves=True, many_nodes=many
    )
    if job.kubernetes.scheduler == "volcano":
        template["spec"]["schedulerName"] = "volcano"
        template["metadata"]["annotations"] = {"scheduling.volcano.sh/queue-name": queue_name(job)}
    made = manifest(
        "apps/v1/Deployment",
        metadata(job, part),
        replicas=shape.replicas,
        selector={"matchLabels": labels_of(job, part)},
        # A new pod is up before an old one goes, where there are GPUs for it; never one fewer than asked for.
        strategy={"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        template=template,
    )
    return _admission(job, made)


def _prefill(job: JobFile, shape: ServedShape, on_gpu: bool) -> list[Body]:
    """Prefill engines have names that decode engines order prompts from."""
    name, gpus = f"{job.name}-prefill", shape.ranks if on_gpu else 0
    command = server_command(
        job, shape, "--role", "prefill", "--transfer-address", f"tcp:0.0.0.0:{TRANSFER_PORT}"
    )
    port = {"name": "transfer", "containerPort": TRANSFER_PORT}
    template = pod_template(job, command, gpus, part="prefill", serves=True, many_nodes=True, ports=[port])
    made = manifest(
        "apps/v1/StatefulSet",
        metadata(job, "prefill"),
        replicas=shape.prefill,
        serviceName=name,
        podManagementPolicy="Parallel",
        selector={"matchLabels": labels_of(job, "prefill")},
        template=template,
    )
    return [service(job, "prefill", "transfer", TRANSFER_PORT, clusterIP="None"), _admission(job, made)]


def _leader_worker(job: JobFile, shape: ServedShape, each: int) -> list[Body]:
    """A replica over several nodes, on each as many ranks as the pod has devices: the leader has the server and the
    first ranks, workers have the others."""
    size, gpus = shape.ranks // each, 0 if job.devices[0].on_cpu else each
    address = f"$(LWS_LEADER_ADDRESS):{RANK_PORT}"
    port = {"name": "ranks", "containerPort": RANK_PORT}
    leads = server_command(job, shape, "--remote-ranks", str(shape.ranks - each), "--rank-address", address)
    works = [  # its engine tells it all else
        "cumulo", "serve", *_model_argument(job), "--rank-of", address, "--rank-count", str(each),
    ]  # fmt: skip
    leader = pod_template(job, leads, gpus, serves=True, many_nodes=True, ports=[port])
    worker = pod_template(job, works, gpus, part="worker", many_nodes=True, env=fleet_key(job))
    group: Body = {
        "size": size,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": leader,
        "workerTemplate": worker,
    }
    one_by_one = {"maxUnavailable": 1, "maxSurge": 0}
    made = manifest(
        "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet",
        metadata(job),
        replicas=shape.replicas,
        startupPolicy="LeaderCreated",
        rolloutStrategy={"type": "RollingUpdate", "rollingUpdateConfiguration": one_by_one},
        leaderWorkerTemplate=group,
    )
    if job.kubernetes.scheduler != "volcano":
        return [_admission(job, made)]
    for template in (leader, worker):
        template["spec"]["schedulerName"] = "volcano"
        template["metadata"]["annotations"] = {"scheduling.k8s.io/group-name": job.name}
    return [_gangs(job, size), made]


def _gangs(job: JobFile, size: int) -> Body:
    """A PodGroup whose pods start replica by replica. minMember alone would be content with two leaders."""
    each: Body = {
        "name": "replica",
        "labelSelector": {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": job.name}},
        "matchLabelKeys": ["leaderworkerset.sigs.k8s.io/group-index"],
        "subGroupSize": size,
        "minSubGroups": 1,
    }
    if job.kubernetes.leafs:
        each["networkTopology"] = {"mode": "soft", "highestTierAllowed": 1}
    kind, queue = "scheduling.volcano.sh/v1beta1/PodGroup", queue_name(job)
    return manifest(kind, metadata(job), minMember=size, queue=queue, subGroupPolicy=[each])


def _ray(job: JobFile, shape: ServedShape, on_gpu: bool) -> list[Body]:
    """The applications that `cumulo launch --on ray` deploys, for KubeRay to keep."""
    serve = job.serve
    assert serve is not None
    low = shape.replicas if serve.min_replicas is None else max(1, serve.min_replicas)
    high = serve.max_replicas or shape.replicas
    gpus = shape.ranks if on_gpu else 0
    options = [*serve.options, *shape.missing(serve.options)]
    entry = "cumulo.cluster.drivers.ray_serve"
    model = model_path(job, serve)
    engines = {"arguments": [*([model] if model else []), *options], "gpus": gpus, "replicas": shape.replicas}
    apps = [
        {"name": name, "route_prefix": route, "import_path": f"{entry}:{name}", "args": args}
        for name, route, args in (("front", "/", {"router": "prefix-aware"}), ("engines", None, engines))
    ]
    spec: Body = {
        "serveConfigV2": yaml.safe_dump({"applications": apps}, sort_keys=False),
        "rayClusterConfig": ray_cluster(job, shape.replicas, gpus, low, high),
    }
    for group in (spec["rayClusterConfig"]["headGroupSpec"], *spec["rayClusterConfig"]["workerGroupSpecs"]):
        group["template"]["spec"]["containers"][0]["env"] += fleet_key(job)
    return [manifest("ray.io/v1/RayService", metadata(job), **spec)]


def _around(job: JobFile, workload: Body) -> list[Body]:
    """What stands next to the pods that answer."""
    serve, part = job.serve, "decode" if workload["metadata"]["name"].endswith("-decode") else ""
    assert serve is not None
    selected = labels_of(job, part)
    chosen, pods = {"matchLabels": labels_of(job)}, {"matchLabels": selected}
    made = [
        service(job, "", "http", 80, selected),
        manifest("policy/v1/PodDisruptionBudget", metadata(job), maxUnavailable=1, selector=pods),
    ]
    if job.kubernetes.monitor:
        endpoint, kind = {"port": "http", "path": "/metrics", "interval": "15s"}, "ServiceMonitor"
        made.append(
            manifest(f"monitoring.coreos.com/v1/{kind}", metadata(job), selector=chosen, endpoints=[endpoint])
        )
    if job.kubernetes.inference_pool:
        made.append(
            manifest(
                "inference.networking.k8s.io/v1/InferencePool",
                metadata(job),
                selector=pods,
                targetPorts=[{"number": PORT}],
                endpointPickerRef=_picker(job),
            )
        )
    return [*made, *autoscaler(job, workload)]


def _picker(job: JobFile) -> Body:
    """The extension that a gateway asks which pod to use. Without one, the gateway chooses: our own Service
    stands in the required field, and does not speak the protocol."""
    if job.kubernetes.endpoint_picker is None:
        return {"name": job.name, "port": {"number": 80}, "failureMode": "FailOpen"}
    name, _, port = job.kubernetes.endpoint_picker.partition(":")
    return {"name": name, "port": {"number": int(port or _PICKER_PORT)}}
