"""Autoscalers of a service on Kubernetes: KEDA, which can scale to zero, or an HPA, on the server's own metrics.
Called for services with min_replicas and max_replicas.

KEDA asks Prometheus, or with `autoscaler: cumulo` an external scaler that has Cumulo's own rule. An HPA reads the
same metric through a metrics adapter, under its own name.
"""

from cumulo.cluster.drivers.kubernetes.pod_template import PORT, Body, labels_of, metadata
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
    low, high = (serve.replicas if serve.min_replicas is None else serve.min_replicas), serve.max_replicas
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
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(job),
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": max(1, low),  # an HPA cannot scale to zero
            "maxReplicas": high,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": WAITING}, "target": wanted}}],
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 0},
                "scaleDown": {
                    "stabilizationWindowSeconds": _COOLDOWN_S,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
                },
            },
        },
    }


def _external(job: JobFile, target: Body, low: int, high: int) -> list[Body]:
    """KEDA with Cumulo's rule: a scaler that asks the pods, and a name that resolves to every one of them."""
    pods, scaler = metadata(job, "pods"), metadata(job, "scaler")
    space = job.kubernetes.namespace
    part = "decode" if target["name"].endswith("-decode") else ""
    headless: Body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods,
        "spec": {
            "clusterIP": "None",
            "selector": labels_of(job, part),
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    }
    port = {"name": "grpc", "containerPort": _SCALER_PORT}
    container: Body = {
        "name": "scaler",
        "image": job.kubernetes.image,
        "command": ["cumulo", "kubernetes", "scaler", "--port", str(_SCALER_PORT)],
        "ports": [port],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        "readinessProbe": {"tcpSocket": {"port": "grpc"}, "periodSeconds": 5},
    }
    labels = labels_of(job, "scaler")
    deployment: Body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": scaler,
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }
    service: Body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": scaler,
        "spec": {
            "selector": labels,
            "ports": [{"name": "grpc", "port": _SCALER_PORT, "targetPort": "grpc"}],
        },
    }
    made = _scaled_object(job, target, low, high)
    # The rule cools down by itself: the HPA does at once what it says.
    at_once = {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
    }
    made["spec"]["advanced"] = {
        "horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": at_once, "scaleDown": at_once}}
    }
    trigger: Body = {
        "type": "external-push",
        "name": "cumulo",
        "metadata": {
            "scalerAddress": f"{scaler['name']}.{space}:{_SCALER_PORT}",
            "pods": f"{pods['name']}.{space}:{PORT}",
            "rule": rule_text(job, low, high),
        },
    }
    if job.kubernetes.gateway:
        trigger["metadata"]["gateway"] = job.kubernetes.gateway
    made["spec"]["triggers"] = [trigger]
    return [headless, deployment, service, made]


def rule_text(job: JobFile, low: int, high: int) -> str:
    """The rule as `cumulo serve --autoscale` takes it."""
    asked = job.serve.autoscale if job.serve is not None else None
    if asked is None:
        raise ConfigError(
            f"{job.name}: autoscaler: cumulo needs serve.autoscale with prompt_tok_s and output_tok_s; "
            "`cumulo simulate autoscale` prints them"
        )
    parts = [f"{low}..{high}", f"interval={asked.interval_s:g}s", f"start-up={asked.start_up_s:g}s"]
    parts += [f"idle={asked.idle_s:g}s"] if low == 0 else []
    parts += [f"prompt-tok-s={asked.prompt_tok_s:.12g}", f"output-tok-s={asked.output_tok_s:.12g}"]
    for name, value in (("ttft", asked.ttft_s), ("tpot", asked.itl_s), ("cooldown", asked.cooldown_s)):
        parts += [f"{name}={value:g}s"] if value is not None else []
    return ",".join(parts)


def _scaled_object(job: JobFile, target: Body, low: int, high: int) -> Body:
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(job),
        "spec": {
            "scaleTargetRef": target,
            "minReplicaCount": low,
            "maxReplicaCount": high,
            "pollingInterval": _POLL_S,
            "cooldownPeriod": _COOLDOWN_S,
            "fallback": {
                "failureThreshold": 4,
                "replicas": max(1, min(high, job.serve.replicas if job.serve else 1)),
            },
        },
    }


def _keda(job: JobFile, target: Body, low: int, high: int) -> Body:
    chosen = f'{{namespace="{job.kubernetes.namespace}",service="{job.name}"}}'
    query = f"sum({WAITING}{chosen})"
    # Scaling to zero asks for what runs, too: a replica that still answers stays.
    active = f"sum({WAITING}{chosen}) + sum({RUNNING}{chosen})"
    threshold = job.kubernetes.waiting_per_replica

    def trigger(name: str, query: str, threshold: int) -> Body:
        return {
            "type": "prometheus",
            "name": name,
            "metadata": {
                "serverAddress": job.kubernetes.prometheus,
                "query": query,
                "threshold": str(threshold),
                "activationThreshold": "0",
            },
        }

    made = _scaled_object(job, target, low, high)
    made["spec"]["triggers"] = [
        trigger("waiting", query, threshold),
        trigger("requests", active, 8 * threshold),
    ]
    return made
