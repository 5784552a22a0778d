"""Manifests as files: plain YAML, a Kustomize base with an overlay, or a Helm chart. `cumulo launch --on kubernetes
--out` writes them.

A chart is made from the same objects: values that people change get a marker, and the marker becomes a template.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cumulo import __version__
from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifests import job_manifests
from cumulo.cluster.drivers.kubernetes.pod_template import Body
from cumulo.cluster.job_file import JobFile
from cumulo.errors import ConfigError

FORMATS = ("yaml", "kustomize", "helm")
_MARKER = re.compile(r"""(['"]?)@@(\w+)@@\1""")
Files = dict[str, str]


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
    makers: dict[str, Callable[[JobFile], Files]] = {"yaml": _plain, "kustomize": _kustomize, "helm": _helm}
    if form not in makers:
        raise ConfigError(f"--format cannot be {form}{did_you_mean(form, FORMATS)}")
    written = []
    for name, text in makers[form](job).items():
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


def _kustomize(job: JobFile) -> Files:
    """`kubectl apply -k overlays/production`; the overlay is where image and replicas are changed."""
    bodies = job_manifests(job)
    names = [_file_name(body) for body in bodies]
    base = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": names}
    image, tag = split_image(job.kubernetes.image)
    overlay: Body = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../../base"],
        "images": [{"name": image, "newName": image, "newTag": tag}],
    }
    counted = [body for body in bodies if body["kind"] in ("Deployment", "StatefulSet")]
    if counted:
        overlay["replicas"] = [
            {"name": body["metadata"]["name"], "count": body["spec"]["replicas"]} for body in counted
        ]
    files = {f"base/{name}": _dump(body) for name, body in zip(names, bodies, strict=True)}
    return files | {
        "base/kustomization.yaml": _dump(base),
        "overlays/production/kustomization.yaml": _dump(overlay),
    }


def split_image(image: str) -> tuple[str, str]:
    """`registry:5000/cumulo:0.1` is `registry:5000/cumulo` and `0.1`."""
    name, colon, tag = image.rpartition(":")
    return (name, tag) if colon and "/" not in tag else (image, "latest")


def _helm(job: JobFile) -> Files:
    """`helm install NAME DIR`. What a chart's user sets is in values.yaml."""
    bodies = job_manifests(job)  # checked as they are; the marked ones below differ in the marked values only
    marked_job = replace(job, kubernetes=replace(job.kubernetes, image="@@image@@"))
    values: dict[str, Any] = {"image": job.kubernetes.image, "namespace": job.kubernetes.namespace}
    marked = _unchecked(marked_job)
    for body in marked:
        if "namespace" in body["metadata"]:
            body["metadata"]["namespace"] = "@@namespace@@"
        if body["kind"] in ("Deployment", "LeaderWorkerSet"):
            values["replicas"], body["spec"]["replicas"] = body["spec"]["replicas"], "@@replicas@@"
        if body["kind"] == "ScaledObject":
            for field, value in (("minReplicaCount", "minReplicas"), ("maxReplicaCount", "maxReplicas")):
                values[value], body["spec"][field] = body["spec"][field], f"@@{value}@@"
        if body["kind"] == "HorizontalPodAutoscaler":
            for field in ("minReplicas", "maxReplicas"):
                values[field], body["spec"][field] = body["spec"][field], f"@@{field}@@"
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


def _unchecked(job: JobFile) -> list[Body]:
    return job_manifests(job, checked=False)


def _templated(text: str) -> str:
    """Braces of a file's own are kept from Helm."""
    escaped = text.replace("{{", '{{ "{{" }}')

    def template(match: re.Match[str]) -> str:
        quote = " | quote" if match[2] in ("fleetKey", "apiKeys") else ""
        return f"{{{{ .Values.{match[2]}{quote} }}}}"

    return _MARKER.sub(template, escaped)
