"""Autoscalers of a service on Kubernetes: KEDA, which can scale to zero, or an HPA, on the server's own metrics.
Called for services with min_replicas and max_replicas.

KEDA asks Prometheus. An HPA reads the same metric through a metrics adapter, under its own name.
"""

from cumulo.cluster.drivers.kubernetes.pod_template import Body, metadata
from cumulo.cluster.job_file import JobFile

WAITING, RUNNING = "cumulo:num_requests_waiting", "cumulo:num_requests_running"  # as /metrics names them
_COOLDOWN_S, _POLL_S = 300, 15


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
            "triggers": [trigger("waiting", query, threshold), trigger("requests", active, 8 * threshold)],
        },
    }
