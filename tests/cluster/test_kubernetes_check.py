"""Manifests are checked without a cluster: against their schemas, against each other, and against nodes, quotas and
a plan. Each problem is named at its field, with what would work."""

import copy
import io
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from cumulo.cli.kubernetes import check
from cumulo.cluster.drivers.kubernetes import check as schema_check
from cumulo.cluster.drivers.kubernetes.check import check_files, check_manifests
from cumulo.cluster.drivers.kubernetes.manifest_source import (
    FieldPath,
    Manifest,
    ManifestProblem,
    parse_manifests,
    shown_path,
)
from cumulo.cluster.drivers.kubernetes.manifests import write_manifests
from cumulo.cluster.drivers.kubernetes.schemas import shipped_book
from cumulo.cluster.job_file import job_from, read_job
from cumulo.errors import ConfigError
from tests.cli.conftest import ROOT

HERE = Path(__file__).parent
SOUND = sorted(HERE.glob("*_manifests.yaml"))
WHOLE = list(yaml.safe_load_all((HERE / "whole_manifests.yaml").read_text("utf-8")))
VLLM = list(yaml.safe_load_all((HERE / "vllm_manifests.yaml").read_text("utf-8")))
CRDS = ROOT.parent / "shared" / "data" / "crds"
POD = "spec.template.spec.containers.0"
SPEC = "spec.template.spec"
RAY = "spec.rayClusterSpec.workerGroupSpecs.0"
GONE = object()  # the value of a field that is taken away
# What is broken: kind and name, field, its new value; and the field that is blamed, with words of the message.
Break = tuple[str, str, Any, str, str]
BROKEN: list[Break] = [
    # unknown fields
    ("Deployment/llm", "spec.replica", 3, "spec.replica", "did you mean replicas?"),
    ("Deployment/llm", f"{POD}.imagePullPolice", "Always", f"{POD}.imagePullPolice", "mean imagePullPolicy?"),
    ("RayJob/ray-train", f"{RAY}.replica", 2, f"{RAY}.replica", "did you mean replicas?"),
    ("Job/train", "spec.minAvailible", 2, "spec.minAvailible", "did you mean minAvailable?"),
    ("LeaderWorkerSet/big", "spec.leaderWorkerTemplate.sizes", 2, "spec.leaderWorkerTemplate.sizes", "mean size?"),
    ("ServiceMonitor/llm", "spec.endpoints.0.intervall", "5s", "spec.endpoints.0.intervall", "mean interval?"),
    ("Deployment/llm", "metadata.lables", {}, "metadata.lables", "did you mean labels?"),
    # wrong types
    ("Deployment/llm", "spec.replicas", "2", "spec.replicas", "a whole number, got \"2\": remove the quotes"),
    ("Job/train", "spec.tasks", {"name": "node"}, "spec.tasks", "must be a list, got a mapping"),
    ("ScaledObject/llm-keda", "spec.triggers.0.metadata.threshold", 4,
     "spec.triggers.0.metadata.threshold", "put it in quotes"),
    ("InferencePool/llm", "spec.targetPorts.0.number", "8000", "spec.targetPorts.0.number", "whole number"),
    ("ClusterQueue/gpus", "spec.resourceGroups.0.flavors.0.resources.0.nominalQuota", "32 GPUs",
     "spec.resourceGroups.0.flavors.0.resources.0.nominalQuota", "is not a quantity"),
    ("Secret/keys", "stringData.fleet", 17, "stringData.fleet", "put it in quotes"),
    # missing fields
    ("RayJob/ray-train", f"{RAY}.groupName", GONE, f"{RAY}.groupName", "is required and missing"),
    ("LeaderWorkerSet/big", "spec.leaderWorkerTemplate.workerTemplate", GONE,
     "spec.leaderWorkerTemplate.workerTemplate", "is required and missing"),
    ("HorizontalPodAutoscaler/llm", "spec.maxReplicas", GONE, "spec.maxReplicas", "is required and missing"),
    ("Topology/fabric", "spec.levels", GONE, "spec.levels", "is required and missing"),
    # values
    ("Deployment/llm", "spec.strategy", {"type": "Rolling"}, "spec.strategy.type", "did you mean RollingUpdate?"),
    ("HyperNode/leaf-0", "spec.members.0.type", "Nod", "spec.members.0.type", "did you mean Node?"),
    ("InferencePool/llm", "spec.targetPorts.0.number", 70000, "spec.targetPorts.0.number", "maximum of 65535"),
    ("Deployment/llm", "metadata.name", "LLM_1", "metadata.name", "does not match"),
    ("LocalQueue/team-a", "apiVersion", "kueue.x-k8s.io/v1", "apiVersion", "did you mean kueue.x-k8s.io/v1beta2?"),
    ("LeaderWorkerSet/big", "kind", "LeaderWorkerSets", "kind", "did you mean LeaderWorkerSet?"),
    ("Topology/fabric", "metadata.namespace", "default", "metadata.namespace", "belongs to the whole cluster"),
    # resources
    ("Deployment/llm", f"{POD}.resources.limits", {"nvidia.com/gpu": 16}, f"{POD}.resources.limits.nvidia.com/gpu",
     "one pod asks for 16 GPUs, and a node has 8"),
    ("Deployment/llm", f"{POD}.resources", {"limits": {"nvidia.com/gpu": 7}},
     f"{POD}.resources.limits.nvidia.com/gpu", "this asks for 7 GPUs on 8-GPU nodes with tp=4: 3 of them"),
    ("Deployment/llm", f"{POD}.resources", {"limits": {"nvidia.com/gpu": 2}},
     f"{POD}.resources.limits.nvidia.com/gpu", "tp=4 and pp=1 need 4 GPUs, and the pod asks for 2"),
    ("Deployment/llm", f"{POD}.resources.limits.memory", "64GB", f"{POD}.resources.limits.memory", "a quantity"),
    ("Job/train", "spec.tasks.0.replicas", 5, "spec.queue", "asks for 40 of nvidia.com/gpu, and the Queue"),
    ("LeaderWorkerSet/big", "spec.replicas", 3, "metadata.labels.kueue.x-k8s.io/queue-name", "asks for 48"),
    # references
    ("Job/train", "spec.queue", "reserch", "spec.queue", "no Queue reserch; did you mean research?"),
    ("LocalQueue/team-a", "spec.clusterQueue", "gpu", "spec.clusterQueue", "there is no ClusterQueue gpu; did you"),
    ("LeaderWorkerSet/big", "metadata.labels", {"kueue.x-k8s.io/queue-name": "team-b"},
     "metadata.labels.kueue.x-k8s.io/queue-name", "there is no LocalQueue team-b; did you mean team-a?"),
    ("ClusterQueue/gpus", "spec.resourceGroups.0.flavors.0.name", "h100",
     "spec.resourceGroups.0.flavors.0.name", "there is no ResourceFlavor h100"),
    ("ResourceFlavor/h200", "spec.topologyName", "fabrik", "spec.topologyName", "no Topology fabrik; did you mean"),
    ("Deployment/llm", f"{POD}.env.0.valueFrom.secretKeyRef.name", "key",
     f"{POD}.env.0.valueFrom.secretKeyRef.name", "there is no Secret key; did you mean keys?"),
    ("Deployment/llm", f"{POD}.env.0.valueFrom.secretKeyRef.key", "flet",
     f"{POD}.env.0.valueFrom.secretKeyRef.key", "the Secret keys has no key flet; did you mean fleet?"),
    ("HorizontalPodAutoscaler/llm", "spec.scaleTargetRef.name", "lm", "spec.scaleTargetRef.name", "no Deployment"),
]  # fmt: skip
MORE: list[Break] = [
    ("Deployment/vllm", f"{POD}.env.0.valueFrom.secretKeyRef", {"nmae": "hf-token", "key": "token"},
     f"{POD}.env.0.valueFrom.secretKeyRef.nmae", "did you mean name?"),
    ("Service/vllm", "spec.type", "LoadBalancr", "spec.type", "did you mean LoadBalancer?"),
    ("Deployment/vllm", f"{SPEC}.volumes.0.persistentVolumeClaim.claimName", "model-cahce",
     f"{SPEC}.volumes.0.persistentVolumeClaim.claimName", "did you mean model-cache?"),
    ("StatefulSet/embed", "spec.serviceName", "embeddings", "spec.serviceName", "there is no Service embeddings"),
    ("Deployment/vllm", f"{SPEC}.serviceAccountName", "runer", f"{SPEC}.serviceAccountName", "mean runner?"),
    ("Job/finetune", "spec.parallelism", 4, "metadata.labels.kueue.x-k8s.io/queue-name", "asks for 32"),
    ("Deployment/vllm", f"{POD}.env.2.name", "HF_TOKEN", f"{POD}.env.2", "the same name HF_TOKEN as item 0"),
]  # fmt: skip


def check_bodies(bodies: Iterable[dict[str, Any]], exists: Iterable[str] = ()) -> list[ManifestProblem]:
    return check_manifests([Manifest("manifests", body) for body in bodies], shipped_book(), 8, exists)


def broken(whole: list[dict[str, Any]], subject: str, path: str, value: Any) -> list[dict[str, Any]]:
    """The manifests with another value in one field; the others are not copied."""
    kind, name = subject.split("/")
    bodies = list(whole)
    at = next(n for n, one in enumerate(bodies) if (one["kind"], one["metadata"]["name"]) == (kind, name))
    place: Any = copy.deepcopy(bodies[at])
    bodies[at] = place
    *steps, last = steps_to(place, path)
    for step in steps:
        place = place[step]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return bodies


def steps_to(body: Any, path: str) -> list[str | int]:
    """A field's place; a key may contain dots."""
    steps: list[str | int] = []
    words, here = path.split("."), body
    while words:
        if isinstance(here, list):
            step: str | int = int(words.pop(0))
        else:
            length = next(n for n in range(len(words), 0, -1) if n == 1 or ".".join(words[:n]) in here)
            step, words = ".".join(words[:length]), words[length:]
        steps.append(step)
        here = here[step] if words else None
    return steps


def plain(path: str) -> str:
    return path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")


@pytest.mark.parametrize("file", SOUND, ids=lambda path: path.stem)
def test_sound_manifests_have_no_problem(file: Path) -> None:
    assert check_bodies(yaml.safe_load_all(file.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    ("whole", "case"),
    [(whole, case) for whole, cases in ((WHOLE, BROKEN), (VLLM, MORE)) for case in cases],
    ids=lambda value: f"{value[0]} {value[1]} {value[4][:20]}" if isinstance(value, tuple) else "",
)
def test_a_broken_field_is_named_with_what_is_wrong(whole: list[dict[str, Any]], case: Break) -> None:
    subject, path, value, blamed, words = case
    problems = check_bodies(broken(whole, subject, path, value))
    told = [str(one) for one in problems]
    assert any(plain(one.path) == blamed and words in one.message for one in problems), told
    assert len(problems) <= 3, told


def test_a_problem_has_the_line_of_its_field() -> None:
    text = "apiVersion: v1\nkind: Secret\nmetadata:\n  name: keys\nstringDate:\n  a: b\n"
    (problem,) = check_manifests(parse_manifests(text, "keys.yaml"), shipped_book(), 8)
    assert str(problem).startswith(
        "keys.yaml:5: Secret/keys stringDate: is not a field of the object; did you mean"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: Secret\n  name: x", "is not valid YAML"),
        ("- a\n- b\n", "an object is a mapping with apiVersion and kind"),
        ("kind: Secret\nmetadata: {name: x}\n", "apiVersion: is required and missing"),
        ("apiVersion: v1\nkind: Secret\nmetadata: {name: x}\ntype: a\ntype: b\n", "type: is given twice"),
        ("apiVersion: v1\nkind: Secret\nmetadata: {}\n", "metadata.name: is required and missing"),
        ("apiVersion: v1\nkind: Secret\nmetadata: {name: x}\ndata:\n", "is empty (null)"),
    ],
)
def test_broken_text_is_named(text: str, words: str) -> None:
    problems = check_manifests(parse_manifests(text, "x.yaml"), shipped_book(), 8)
    assert any(words in str(one) for one in problems), problems


def test_two_objects_of_one_name_are_named() -> None:
    assert any("another Secret keys" in one.message for one in check_bodies([*WHOLE, WHOLE[1]]))


def test_an_object_that_the_cluster_has_need_not_be_there() -> None:
    bodies = broken(WHOLE, "Job/train", "spec.queue", "other")
    assert [one.path for one in check_bodies(bodies)] == ["spec.queue"]
    assert check_bodies(bodies, exists=["Queue/other"]) == []


@pytest.mark.long
@pytest.mark.skipif(not CRDS.is_dir(), reason="the folder with the projects' own definitions is not here")
def test_whole_manifests_are_valid_against_the_projects_own_definitions() -> None:
    manifests, problems = check_files([HERE / "whole_manifests.yaml"], crds=CRDS)
    assert len(manifests) == len(WHOLE)
    assert problems == []


def test_without_the_jsonschema_library_the_check_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    monkeypatch.setattr(schema_check, "_validator_class", schema_check._validator_class.__wrapped__)
    shipped_book().validators.clear()
    with pytest.raises(ConfigError, match=r"pip install 'cumulo\[kubernetes\]'"):
        check_bodies(WHOLE)


# -- fields of wrong types ----------------------------------------------------------------------------------
WRONG: dict[type, list[Any]] = {
    str: [{"a": 1}, [1]],
    int: [{"a": 1}, 1.5],
    dict: ["x", [1]],
    list: ["x", {"a": 1}, 5],
    bool: ["maybe", 3],
}
EVERY = 23  # which of the fields; a prime, so that each kind of field has its turn


def fields_of(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*path, key), one
        yield from fields_of(one, (*path, key))


def with_value(body: Any, path: FieldPath, value: Any) -> Any:
    made: Any = copy.deepcopy(body)
    place = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return made


def is_free(path: FieldPath, value: Any) -> bool:
    """Fields whose numbers may be quantities or shares, or that have no type of their own."""
    names = {str(step) for step in path}
    return isinstance(value, int) and bool(names & {"requests", "limits", "capability", "nominalQuota"})


@pytest.mark.long
@pytest.mark.parametrize("file", SOUND, ids=lambda path: path.stem)
def test_a_wrong_type_is_named_at_its_field(file: Path, request: pytest.FixtureRequest) -> None:
    whole = list(yaml.safe_load_all(file.read_text("utf-8")))
    cases = [
        (number, path, value, wrong)
        for number, body in enumerate(whole)
        for path, value in fields_of(body)
        if path[0] not in ("apiVersion", "kind") and not is_free(path, value)
        for wrong in WRONG.get(type(value), ())
    ]
    step = 1 if request.config.getoption("--thorough") else EVERY
    for number, path, value, wrong in cases[::step]:
        bodies = [*whole[:number], with_value(whole[number], path, wrong), *whole[number + 1 :]]
        told = check_bodies(bodies)
        assert shown_path(path) in {one.path for one in told}, (
            path,
            value,
            wrong,
            [str(one) for one in told],
        )


def test_an_object_of_an_unknown_kind_with_fields_of_wrong_types_does_not_stop_the_check() -> None:
    pod = {"containers": [{"name": "a", "image": "b", "ports": 5, "resources": "x", "env": {"a": 1}}]}
    strange = {
        "apiVersion": "example.com/v1",
        "kind": "Notebook",
        "metadata": {"name": "n", "labels": "x"},
        "spec": {"template": {"spec": pod}},
    }
    assert [one.path for one in check_bodies([strange])] == ["kind"]


# -- against a plan -----------------------------------------------------------------------------------------
PLAN = {"tp": 4, "replicas": 2, "planned_for": {"device": "a100", "devices": 8, "rate": 1.0, "slo_percentile": 95.0,
                                                "output_tok_s": 500.0}}  # fmt: skip


def against(tmp_path: Path, bodies: list[dict[str, Any]], **changed: Any) -> list[str]:
    manifests, plan = tmp_path / "all.yaml", tmp_path / "plan.yaml"
    kept = [one for one in bodies if one["metadata"]["name"] not in ("ray-llm", "embed", "batch")]
    manifests.write_text(yaml.safe_dump_all(kept), "utf-8")
    plan.write_text(yaml.safe_dump(PLAN | changed), "utf-8")
    return [f"{plain(one.path)}: {one.message}" for one in check_files([manifests], plan=plan)[1]]


def test_manifests_that_carry_out_their_plan_have_no_problem(tmp_path: Path) -> None:
    assert against(tmp_path, VLLM) == []


@pytest.mark.parametrize(
    ("path", "value", "changed", "words"),
    [
        (f"{POD}.resources", {"limits": {"nvidia.com/gpu": 7}}, {},
         "nvidia.com/gpu: this asks for 7 GPUs on 8-GPU nodes with tp=4: 3 of them are never used"),
        (f"{POD}.resources", {"limits": {"nvidia.com/gpu": 2}}, {}, "needs 4 GPUs (tp=4), and this has 2"),
        (f"{POD}.args", ["--tensor-parallel-size=2"], {}, "args: --tp is 2, and the plan has tp=4"),
        ("spec.replicas", 3, {}, "spec.replicas: the plan has 2 replicas (8 GPUs), and this has 3"),
        ("spec.replicas", 2, {"replicas": 1, "prefill": 1, "decode": 2}, "has 1 prefill engines, and no object"),
        ("spec.replicas", 2, {"pp": 2}, "a replica of the plan needs 8 GPUs (tp=4, pp=2), and this has 4"),
    ],
)  # fmt: skip
def test_what_differs_from_the_plan_is_named(
    tmp_path: Path, path: str, value: Any, changed: dict[str, Any], words: str
) -> None:
    problems = against(tmp_path, broken(VLLM, "Deployment/vllm", path, value), **changed)
    assert any(words in one for one in problems), problems


def test_a_file_that_is_no_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a plan that `cumulo plan serve --out` wrote"):
        check_files([HERE / "vllm_manifests.yaml"], plan=_written(tmp_path, "tp: 4\n"))
    with pytest.raises(ConfigError, match="cannot read the plan"):
        check_files([HERE / "vllm_manifests.yaml"], plan=tmp_path / "none.yaml")


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text, "utf-8")
    return path


# -- files that Cumulo writes -------------------------------------------------------------------------------
SERVICE = job_from(
    {
        "name": "llm",
        "serve": {"model": "org/model", "replicas": 2, "min_replicas": 1, "max_replicas": 6},
        "devices": {"count": 2, "kind": "gpu"},
        "kubernetes": {"scheduler": "none"},
    }
)


@pytest.mark.parametrize("name", ["job-serve-gpu", "job-train-gpu", "job-gang"])
def test_what_launch_writes_passes_the_check_as_it_stands(tmp_path: Path, name: str) -> None:
    """Also what needs objects of the cluster, such as a claim: the manifests name them."""
    write_manifests(read_job(ROOT / "examples" / f"{name}.yaml"), tmp_path, "yaml")
    manifests, problems = check_files([tmp_path])
    assert problems == [] and len(manifests) > 1


def test_a_chart_is_left_to_helm_whose_output_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifests(SERVICE, tmp_path, "helm")
    with pytest.raises(
        ConfigError, match=r"is a Helm chart, .*: helm template .* \| cumulo kubernetes check -"
    ):
        check_files([tmp_path])
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump_all(broken(WHOLE, *BROKEN[0][:3]))))
    assert [one.path for one in check_files([Path("-")])[1]] == ["spec.replica"]


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
    write_manifests(SERVICE, tmp_path, "yaml")
    checked = partial(check, [tmp_path], crds=None, node_gpus=8, plan=None, exists=None)
    checked()
    path = tmp_path / "deployment-llm.yaml"
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
    with pytest.raises(typer.Exit):
        checked()
    assert f"containers[0].command: {said}" in capsys.readouterr().out
