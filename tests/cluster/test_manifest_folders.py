"""Folders of manifests: Helm charts are checked with their values, and kustomizations against their files."""

from pathlib import Path

import pytest
import typer

from cumulo.cli.cloud.kubernetes import check
from cumulo.cluster.drivers.kubernetes.check import check_files
from cumulo.cluster.drivers.kubernetes.writing import write_manifests
from cumulo.cluster.job_file import job_from

JOB = job_from(
    {
        "name": "llm",
        "serve": {"model": "org/model", "replicas": 2, "min_replicas": 1, "max_replicas": 6},
        "devices": {"count": 2, "kind": "gpu"},
        "kubernetes": {"scheduler": "none"},
    }
)


def told(folder: Path) -> list[str]:
    return [str(one).replace(f"{folder}/", "") for one in check_files([folder])[1]]


@pytest.mark.parametrize("form", ["yaml", "kustomize", "helm"])
def test_what_is_written_is_checked_as_it_stands(tmp_path: Path, form: str) -> None:
    write_manifests(JOB, tmp_path, form)
    manifests, problems = check_files([tmp_path])
    assert problems == [] and {"Deployment", "Service"} <= {one.kind for one in manifests}


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "values.yaml", "replicas: 2", "replicas: two",
            'templates/deployment-llm.yaml:12: Deployment/llm spec.replicas: must be a whole number, got "two" '
            "(replicas in values.yaml)",
        ),
        (
            "values.yaml", "maxReplicas: 6", "maxReplicas: 0",
            "templates/scaledobject-llm.yaml:16: ScaledObject/llm spec.minReplicaCount: 1 is more than "
            "maxReplicaCount, 0 (minReplicas in values.yaml)",
        ),
        (
            "values.yaml", "image:", "imag:",
            "templates/deployment-llm.yaml:34: chart: uses .Values.image, and values.yaml has no image; did you "
            "mean imag?",
        ),
        ("values.yaml", "image:", "image: [", "values.yaml:2: chart: is not valid YAML: "),
        ("Chart.yaml", "apiVersion: v2", "apiVersion: v3", "Chart.yaml: chart: apiVersion must be v2 or v1"),
        ("Chart.yaml", "version: 0.1.0", "versio: 0.1.0", "Chart.yaml: chart: version is required and missing"),
        (
            "templates/service-llm.yaml", "kind: Service", '{{- include "llm.kind" . }}',
            'templates/service-llm.yaml:2: chart: {{ include "llm.kind" . }} needs Helm: ',
        ),
        (
            "templates/service-llm.yaml", "targetPort: http", "targetPort: web",
            "templates/service-llm.yaml:20: Service/llm spec.ports[0].targetPort: its pods have no port web",
        ),
    ],
)  # fmt: skip
def test_a_chart_is_checked_with_its_values(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    write_manifests(JOB, tmp_path, "helm")
    text = (tmp_path / file).read_text("utf-8")
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1), "utf-8")
    found = told(tmp_path)
    assert any(one.startswith(said) for one in found), found


def test_pipes_and_literals_of_a_chart_are_understood(tmp_path: Path) -> None:
    write_manifests(JOB, tmp_path, "helm")
    path = tmp_path / "templates" / "more.yaml"
    path.write_text(
        'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name | default "x" }}-more}\n'
        "data: {replicas: {{ .Values.replicas | quote }}, level: {{ .Values.level | default 3 | quote }}}\n"
        "{{- /* a comment */ -}}\n",
        "utf-8",
    )
    manifests, problems = check_files([tmp_path])
    (made,) = (one for one in manifests if one.kind == "ConfigMap")
    assert (made.name, made.body["data"], problems) == ("llm-more", {"replicas": "2", "level": "3"}, [])


def test_a_kustomization_names_files_and_objects_that_are_there(tmp_path: Path) -> None:
    write_manifests(JOB, tmp_path, "kustomize")
    overlay = tmp_path / "overlays" / "production" / "kustomization.yaml"
    overlay.write_text(overlay.read_text("utf-8").replace("name: llm", "name: lm"), "utf-8")
    (tmp_path / "base" / "servicemonitor-llm.yaml").rename(tmp_path / "monitor.yaml")
    found = told(tmp_path)
    assert len(found) == 2, found
    assert "resources[4]: there is no base/servicemonitor-llm.yaml" in found[0]
    assert "replicas[0].name: there is no Deployment or StatefulSet lm; did you mean llm?" in found[1]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("--no-console", "--no-consol", "cumulo serve: No such option: --no-consol"),
        ("--drain-timeout", "--drain", "cumulo serve: No such option: --drain"),
    ],
)
def test_options_of_the_server_are_checked_by_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    write_manifests(JOB, tmp_path, "yaml")
    check([tmp_path])
    path = tmp_path / "deployment-llm.yaml"
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
    with pytest.raises(typer.Exit):
        check([tmp_path])
    assert f"containers[0].command: {said}" in capsys.readouterr().out
