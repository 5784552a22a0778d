"""Manifests of a service: replicas on one node (Deployment) or over several (LeaderWorkerSet), prefill and decode
apart, KubeRay's RayService; with Service, probes, autoscaler, disruption budget and monitor. Called by
`job_manifests`.
"""

from pathlib import Path
from typing import Any

import yaml

from cumulo.cluster.drivers.kubernetes.pod_template import (
    DATA,
    DRAIN_S,
    KEYS,
    PORT,
    RANK_PORT,
    TRANSFER_PORT,
    Body,
    filled,
    pod_template,
    queue_name,
    queues,
    ray_pods,
)
from cumulo.cluster.job_file import JobFile
from cumulo.cluster.job_settings import ServeWork
from cumulo.cluster.served_shape import ServedShape, served_shape
from cumulo.errors import ConfigError
from cumulo.plan.serve.plan_file import read_plan

_PICKER_PORT = "9002"  # where endpoint pickers of the Gateway API listen


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
    shape, serve = served_shape(job), job.serve
    assert serve is not None
    _check(job, shape)
    gpus, each = 0 if job.devices[0].on_cpu else shape.ranks, _node_devices(job)
    if job.kubernetes.scheduler == "ray":
        return filled("serve", job, **_ray(job, serve, shape, gpus))
    if job.kubernetes.autoscaler == "cumulo" and serve.max_replicas is not None and serve.autoscale is None:
        raise ConfigError(
            f"{job.name}: autoscaler: cumulo needs serve.autoscale with prompt_tok_s and output_tok_s; "
            "`cumulo simulate autoscale` prints them"
        )
    if each is not None and shape.ranks > each:
        values = _leader_worker(job, shape, each)
    else:
        values = _deployment(job, shape, gpus)
    name, _, port = (job.kubernetes.endpoint_picker or "").partition(":")
    values |= {"shape": shape, "picker": (name, int(port or _PICKER_PORT))}
    return [*queues(job), *filled("serve", job, **values, fewest=serve.fewest, most=serve.most)]


def server_command(job: JobFile, shape: ServedShape, *more: str) -> list[str]:
    serve = job.serve
    assert serve is not None
    options = [*serve.options, *shape.missing(serve.options)]
    keys = ["--api-keys", f"{KEYS}/api-keys"] if job.kubernetes.api_keys else []
    return [
        "cumulo", "serve", *_model_argument(job, serve), "--host", "0.0.0.0", "--port", str(PORT), "--allow-host",
        "*", "--drain-timeout", str(DRAIN_S), "--no-console", *keys, *options, *more,
    ]  # fmt: skip


def _model_argument(job: JobFile, serve: ServeWork) -> list[str]:
    """A folder of this machine is on the volume in the cluster."""
    model = serve.model
    if serve.plan is not None:
        model = read_plan(Path(serve.plan)).model
    if model and Path(model).is_absolute() and job.kubernetes.claim:
        model = f"{DATA}/models/{Path(model).name}"
    return [model] if model else []


def _deployment(job: JobFile, shape: ServedShape, gpus: int) -> Body:
    """Replicas on one node each; prefill engines where they are apart, from which the others order prompts."""
    values: Body = {"api_version": "apps/v1", "kind": "Deployment", "part": "decode" if shape.prefill else ""}
    more: list[str] = []
    if shape.prefill:
        name = f"{job.name}-prefill"
        peers = [f"tcp:{name}-{number}.{name}:{TRANSFER_PORT}" for number in range(shape.prefill)]
        more = ["--role", "decode", *(word for peer in peers for word in ("--prefill-engine", peer))]
        listens = ("--role", "prefill", "--transfer-address", f"tcp:0.0.0.0:{TRANSFER_PORT}")
        values["prefill"] = pod_template(
            job, server_command(job, shape, *listens), gpus, part="prefill", serves=True, many_nodes=True,
            ports={"transfer": TRANSFER_PORT},
        )  # fmt: skip
    in_queue = {"scheduling.volcano.sh/queue-name": queue_name(job)}
    volcano = job.kubernetes.scheduler == "volcano"
    values["pod"] = pod_template(
        job, server_command(job, shape, *more), gpus, part=values["part"], serves=True, volcano=volcano,
        many_nodes=bool(shape.prefill), annotations=in_queue if volcano else {},
    )  # fmt: skip
    return values


def _leader_worker(job: JobFile, shape: ServedShape, each: int) -> Body:
    """A replica over several nodes, on each as many ranks as the pod has devices: the leader has the server and the
    first ranks, workers have the others."""
    assert job.serve is not None
    gpus, address = 0 if job.devices[0].on_cpu else each, f"$(LWS_LEADER_ADDRESS):{RANK_PORT}"
    leads = server_command(job, shape, "--remote-ranks", str(shape.ranks - each), "--rank-address", address)
    works = [  # its engine tells it all else
        "cumulo", "serve", *_model_argument(job, job.serve), "--rank-of", address, "--rank-count", str(each),
    ]  # fmt: skip
    volcano = job.kubernetes.scheduler == "volcano"
    shared: Body = {"many_nodes": True, "volcano": volcano}
    shared["annotations"] = {"scheduling.k8s.io/group-name": job.name} if volcano else {}
    leader = pod_template(job, leads, gpus, serves=True, ports={"ranks": RANK_PORT}, **shared)
    worker = pod_template(job, works, gpus, part="worker", in_fleet=True, **shared)
    return {
        "api_version": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "part": "",
        "nodes": shape.ranks // each, "leader": leader, "worker": worker,
    }  # fmt: skip


def _ray(job: JobFile, serve: ServeWork, shape: ServedShape, gpus: int) -> Body:
    """The applications that `cumulo launch --on ray` deploys, for KubeRay to keep."""
    entry = "cumulo.cluster.drivers.ray_serve"
    arguments = [*_model_argument(job, serve), *serve.options, *shape.missing(serve.options)]
    engines: dict[str, Any] = {"arguments": arguments, "gpus": gpus, "replicas": shape.replicas}
    apps = [
        {"name": name, "route_prefix": route, "import_path": f"{entry}:{name}", "args": args}
        for name, route, args in (("front", "/", {"router": "prefix-aware"}), ("engines", None, engines))
    ]
    return {
        "applications": yaml.safe_dump({"applications": apps}, sort_keys=False),
        "nodes": shape.replicas,
        "fewest": shape.replicas if serve.min_replicas is None else max(1, serve.min_replicas),
        "most": serve.max_replicas or shape.replicas,
        **ray_pods(job, gpus, in_fleet=True),
    }
