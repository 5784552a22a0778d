"""All Kubernetes objects of a job file, checked before anybody sees them. `cumulo launch --on kubernetes` calls it.

bodies = job_manifests(read_job(Path("examples/job-serve-gpu.yaml")))
"""

from pathlib import Path
from typing import Any

import yaml

from cumulo.cluster.drivers.kubernetes.check import check_together
from cumulo.cluster.drivers.kubernetes.manifest_source import Manifest
from cumulo.cluster.drivers.kubernetes.manifests_serve import serve_manifests
from cumulo.cluster.drivers.kubernetes.manifests_train import train_manifests
from cumulo.cluster.drivers.kubernetes.pod_template import CONFIG, Body, config_source, metadata, secret_name
from cumulo.cluster.drivers.kubernetes.queues import queue_name
from cumulo.cluster.drivers.kubernetes.references import EXISTS
from cumulo.cluster.job_file import JobFile, plain_job
from cumulo.errors import ConfigError

FILL_IN = "replace-before-applying"


def job_manifests(job: JobFile, checked: bool = True) -> list[Body]:
    made = train_manifests(job) if job.train is not None else serve_manifests(job)
    bodies = [*_secret(job), *_config(job), *made]
    if there := assumed(job):
        for body in made:
            body["metadata"].setdefault("annotations", {})[EXISTS] = ",".join(there)
    manifests = [Manifest(f"job {job.name}", body) for body in bodies]
    if checked and (problems := check_together(manifests, job.kubernetes.node_gpus)):
        raise ConfigError("\n".join(map(str, problems)))
    return bodies


def assumed(job: JobFile) -> list[str]:
    """Objects that the job file says the cluster has; the manifests name them to whoever checks them."""
    found = []
    settings = job.kubernetes
    if settings.quota is None:
        found += [f"Queue/{queue_name(job)}", f"LocalQueue/{queue_name(job)}"]
    if settings.claim:
        found.append(f"PersistentVolumeClaim/{settings.claim}")
    if settings.secret:
        found.append(f"Secret/{settings.secret}")
    if settings.endpoint_picker:
        found.append(f"Service/{settings.endpoint_picker.partition(':')[0]}")
    return found


def _secret(job: JobFile) -> list[Body]:
    """Values are never in a job file: who applies the manifests fills them in, or names a Secret of theirs."""
    if job.kubernetes.secret is not None or job.serve is None:
        return []
    values = {"fleet-key": FILL_IN} | ({"api-keys": FILL_IN} if job.kubernetes.api_keys else {})
    named = metadata(job)
    named["name"] = secret_name(job)
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": named, "type": "Opaque", "stringData": values}]


def _config(job: JobFile) -> list[Body]:
    """The configuration or plan that the pods read, and the job itself where Ray launches it inside the cluster."""
    source = config_source(job)
    if source is None:
        return []
    path = Path(source)
    files = {path.name: path.read_text("utf-8")}
    if job.kubernetes.scheduler == "ray" and job.train is not None:
        table: dict[str, Any] = plain_job(job)
        table.pop("kubernetes", None)
        key = "config" if job.train.config is not None else "plan"
        table["train"] = dict(table["train"]) | {key: f"{CONFIG}/{path.name}"}
        files["job.yaml"] = yaml.safe_dump(table, sort_keys=False)
    named = metadata(job)
    named["name"] = f"{job.name}-config"
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "data": files}]
