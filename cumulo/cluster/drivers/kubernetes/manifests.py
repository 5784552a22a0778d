"""All Kubernetes objects of a job file, checked before anybody sees them, and as files: plain YAML or a Helm
chart. `cumulo launch --on kubernetes` calls it, and writes files with `--out`.

A chart is made from the same objects: values that people change get a marker, and the marker becomes a template.

bodies = job_manifests(read_job(Path("examples/job-serve-gpu.yaml")))
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cumulo import __version__
from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.check import check_together
from cumulo.cluster.drivers.kubernetes.manifest_source import Manifest
from cumulo.cluster.drivers.kubernetes.manifests_serve import serve_manifests
from cumulo.cluster.drivers.kubernetes.manifests_train import train_manifests
from cumulo.cluster.drivers.kubernetes.pod_template import (
    CONFIG,
    Body,
    config_source,
    metadata,
    queue_name,
    secret_name,
)
from cumulo.cluster.drivers.kubernetes.references import EXISTS
from cumulo.cluster.job_file import JobFile, plain_job
from cumulo.errors import ConfigError

FILL_IN = "replace-before-applying"
_QUEUES = {"volcano": "Queue", "kueue": "LocalQueue"}


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
    if settings.quota is None and settings.scheduler in _QUEUES:
        found.append(f"{_QUEUES[settings.scheduler]}/{queue_name(job)}")
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


FORMATS = ("yaml", "helm")
_MARKER = re.compile(r"""(['"]?)@@(\w+)@@\1""")
Files = dict[str, str]
_VALUES = {  # fields of a spec that a chart's user sets, by kind, and what values.yaml calls them
    "Deployment": {"replicas": "replicas"},
    "LeaderWorkerSet": {"replicas": "replicas"},
    "ScaledObject": {"minReplicaCount": "minReplicas", "maxReplicaCount": "maxReplicas"},
    "HorizontalPodAutoscaler": {"minReplicas": "minReplicas", "maxReplicas": "maxReplicas"},
}


class _Dumper(yaml.SafeDumper):
    """Lists stand inside their field, and files in a ConfigMap as they are written."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def as_yaml(bodies: list[Body]) -> str:
    return "---\n".join(_dump(body) for body in bodies)


def write_manifests(job: JobFile, folder: Path, form: str) -> list[Path]:
    """The files that were written."""
    if form not in FORMATS:
        raise ConfigError(f"--format cannot be {form}{did_you_mean(form, FORMATS)}")
    written = []
    for name, text in (_helm(job) if form == "helm" else _plain(job)).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        written.append(path)
    return written


def _dump(body: Any) -> str:
    return yaml.dump(body, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _file_name(body: Body) -> str:
    name = f"{body['kind'].lower()}-{body['metadata']['name']}.yaml"
    return name.replace("configmap-", "config-").replace("poddisruptionbudget-", "disruption-")


def _plain(job: JobFile) -> Files:
    return {_file_name(body): _dump(body) for body in job_manifests(job)}


def _helm(job: JobFile) -> Files:
    """`helm install NAME DIR`. What a chart's user sets is in values.yaml."""
    bodies = job_manifests(job)  # checked as they are; the marked ones below differ in the marked values only
    marked_job = replace(job, kubernetes=replace(job.kubernetes, image="@@image@@"))
    values: dict[str, Any] = {"image": job.kubernetes.image, "namespace": job.kubernetes.namespace}
    marked = job_manifests(marked_job, checked=False)
    for body in marked:
        if "namespace" in body["metadata"]:
            body["metadata"]["namespace"] = "@@namespace@@"
        for field, value in _VALUES.get(body["kind"], {}).items():
            values[value], body["spec"][field] = body["spec"][field], f"@@{value}@@"
        if body["kind"] == "Secret":
            for key in body["stringData"]:
                name = re.sub(r"-(\w)", lambda match: match[1].upper(), key)
                values[name], body["stringData"][key] = body["stringData"][key], f"@@{name}@@"
    chart = {
        "apiVersion": "v2",
        "name": job.name,
        "description": f"{job.kind} job {job.name}, written by cumulo launch",
        "type": "application",
        "version": "0.1.0",
        "appVersion": __version__,
    }
    templates = {
        f"templates/{_file_name(plain)}": _templated(_dump(body))
        for plain, body in zip(bodies, marked, strict=True)
    }
    return {"Chart.yaml": _dump(chart), "values.yaml": _dump(values), **templates}


def _templated(text: str) -> str:
    """Braces of a file's own are kept from Helm."""
    escaped = text.replace("{{", '{{ "{{" }}')

    def template(match: re.Match[str]) -> str:
        quote = " | quote" if match[2] in ("fleetKey", "apiKeys") else ""
        return f"{{{{ .Values.{match[2]}{quote} }}}}"

    return _MARKER.sub(template, escaped)
