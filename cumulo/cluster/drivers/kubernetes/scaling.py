"""Autoscalers of a service on Kubernetes: KEDA, which can scale to zero, or an HPA, on the server's own metrics.
Called for services with min_replicas and max_replicas.

KEDA asks Prometheus, or with `autoscaler: cumulo` an external scaler that has Cumulo's own rule. An HPA reads the
same metric through a metrics adapter, under its own name.
"""

from cumulo.cluster.drivers.kubernetes.pod_template import PORT, Body, labels_of, manifest, metadata, service
from cumulo.cluster.job_file import JobFile
from cumulo.errors import ConfigError

WAITING, RUNNING = "cumulo:num_requests_waiting", "cumulo:num_requests_running"  # as /metrics names them
_COOLDOWN_S, _POLL_S = 300, 15
_SCALER_PORT = 9090


def autoscaler(job: JobFile, workload: Body) -> list[Body]:
    serve = job.serve
    assert serve is not None
    if serve.max_replicas is None:
        return []
    low, high = serve.fewest, serve.most
    target = {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "name": workload["metadata"]["name"],
    }
    if job.kubernetes.autoscaler == "cumulo":
        return _external(job, target, low, high)
    return [
        _hpa(job, target, low, high) if job.kubernetes.autoscaler == "hpa" else _keda(job, target, low, high)
    ]


def _hpa(job: JobFile, target: Body, low: int, high: int) -> Body:
    wanted = {"type": "AverageValue", "averageValue": str(job.kubernetes.waiting_per_replica)}
    one_a_minute = [{"type": "Pods", "value": 1, "periodSeconds": 60}]
    return manifest(
        "autoscaling/v2/HorizontalPodAutoscaler",
        metadata(job),
        scaleTargetRef=target,
        minReplicas=max(1, low),  # an HPA cannot scale to zero
        maxReplicas=high,
        metrics=[{"type": "Pods", "pods": {"metric": {"name": WAITING}, "target": wanted}}],
        behavior={
            "scaleUp": {"stabilizationWindowSeconds": 0},
            "scaleDown": {"stabilizationWindowSeconds": _COOLDOWN_S, "policies": one_a_minute},
        },
    )


def _external(job: JobFile, target: Body, low: int, high: int) -> list[Body]:
    """KEDA with Cumulo's rule: a scaler that asks the pods, and a name that resolves to every one of them."""
    space, serve = job.kubernetes.namespace, job.serve
    if serve is None or serve.autoscale is None:
        raise ConfigError(
            f"{job.name}: autoscaler: cumulo needs serve.autoscale with prompt_tok_s and output_tok_s; "
            "`cumulo simulate autoscale` prints them"
        )
    part = "decode" if target["name"].endswith("-decode") else ""
    headless = service(job, "pods", "http", PORT, labels_of(job, part), clusterIP="None")
    container: Body = {
        "name": "scaler",
        "image": job.kubernetes.image,
        "command": ["cumulo", "kubernetes", "scaler", "--port", str(_SCALER_PORT)],
        "ports": [{"name": "grpc", "containerPort": _SCALER_PORT}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        "readinessProbe": {"tcpSocket": {"port": "grpc"}, "periodSeconds": 5},
    }
    labels = labels_of(job, "scaler")
    deployment = manifest(
        "apps/v1/Deployment",
        metadata(job, "scaler"),
        replicas=1,
        selector={"matchLabels": labels},
        template={"metadata": {"labels": labels}, "spec": {"containers": [container]}},
    )
    told: Body = {
        "scalerAddress": f"{job.name}-scaler.{space}:{_SCALER_PORT}",
        "pods": f"{job.name}-pods.{space}:{PORT}",
        "rule": serve.autoscale_rule,
    }
    if job.kubernetes.gateway:
        told["gateway"] = job.kubernetes.gateway
    made = _scaled_object(job, target, low, high, [{"type": "external", "name": "cumulo", "metadata": told}])
    # The rule cools down by itself: the HPA does at once what it says.
    policies = [{"type": "Percent", "value": 100, "periodSeconds": 15}]
    at_once = {"stabilizationWindowSeconds": 0, "policies": policies}
    made["spec"]["advanced"] = {
        "horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": at_once, "scaleDown": at_once}}
    }
    return [headless, deployment, service(job, "scaler", "grpc", _SCALER_PORT), made]


def _scaled_object(job: JobFile, target: Body, low: int, high: int, triggers: list[Body]) -> Body:
    usual = max(1, min(high, job.serve.replicas if job.serve else 1))
    return manifest(
        "keda.sh/v1alpha1/ScaledObject",
        metadata(job),
        scaleTargetRef=target,
        minReplicaCount=low,
        maxReplicaCount=high,
        pollingInterval=_POLL_S,
        cooldownPeriod=_COOLDOWN_S,
        fallback={"failureThreshold": 4, "replicas": usual},
        triggers=triggers,
    )


def _keda(job: JobFile, target: Body, low: int, high: int) -> Body:
    chosen = f'{{namespace="{job.kubernetes.namespace}",service="{job.name}"}}'
    # Scaling to zero asks for what runs, too: a replica that still answers stays.
    active = f"sum({WAITING}{chosen}) + sum({RUNNING}{chosen})"
    threshold = job.kubernetes.waiting_per_replica
    triggers = [
        {
            "type": "prometheus",
            "name": name,
            "metadata": {
                "serverAddress": job.kubernetes.prometheus,
                "query": query,
                "threshold": str(most),
                "activationThreshold": "0",
            },
        }
        for name, query, most in (
            ("waiting", f"sum({WAITING}{chosen})", threshold),
            ("requests", active, 8 * threshold),
        )
    ]
    return _scaled_object(job, target, low, high, triggers)
