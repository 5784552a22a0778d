"""Manifests are checked without a cluster, and each broken one is named precisely: the field, what is wrong, what
would work."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cumulo.cluster.drivers.kubernetes.cel import keeps_rule
from cumulo.cluster.drivers.kubernetes.check import check_bodies, check_files, check_manifests
from cumulo.cluster.drivers.kubernetes.manifest_source import parse_manifests
from cumulo.cluster.drivers.kubernetes.schemas import shipped_book
from tests.cli.conftest import ROOT
from tests.cluster.broken_manifests import GONE, Break, broken, is_named_at_its_field

FILE = Path(__file__).parent / "whole_manifests.yaml"
WHOLE = list(yaml.safe_load_all(FILE.read_text("utf-8")))
CRDS = ROOT.parent / "shared" / "data" / "crds"
POD = "spec.template.spec.containers.0"
RAY = "spec.rayClusterSpec.workerGroupSpecs.0"
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
    ("Deployment/llm", f"{POD}.image", GONE, f"{POD}.image", "is required and missing"),
    ("Topology/fabric", "spec.levels", GONE, "spec.levels", "is required and missing"),
    # values
    ("Deployment/llm", "spec.strategy", {"type": "Rolling"}, "spec.strategy.type", "did you mean RollingUpdate?"),
    ("HyperNode/leaf-0", "spec.members.0.type", "Nod", "spec.members.0.type", "did you mean Node?"),
    ("InferencePool/llm", "spec.targetPorts.0.number", 70000, "spec.targetPorts.0.number", "65535 or less"),
    ("ScaledObject/llm-keda", "spec.minReplicaCount", 9, "spec", "less than or equal to maxReplicaCount"),
    ("HyperNode/leaf-0", "spec.members.0.selector", {}, "spec.members.0.selector", "must be specified"),
    ("HorizontalPodAutoscaler/llm", "spec.minReplicas", 9, "spec.minReplicas", "9 is more than maxReplicas, 8"),
    ("Deployment/llm", "metadata.name", "LLM_1", "metadata.name", "is not a name"),
    ("LocalQueue/team-a", "apiVersion", "kueue.x-k8s.io/v1", "apiVersion", "did you mean kueue.x-k8s.io/v1beta2?"),
    ("LeaderWorkerSet/big", "kind", "LeaderWorkerSets", "kind", "did you mean LeaderWorkerSet?"),
    ("Topology/fabric", "metadata.namespace", "default", "metadata.namespace", "belongs to the whole cluster"),
    ("RayJob/ray-train", "spec.entrypoint", GONE, "spec.entrypoint", "is required and missing"),
    ("RayJob/ray-train", "spec.submissionMode", "K8sJobMod", "spec.submissionMode", "did you mean K8sJobMode?"),
    ("Job/train", "spec.tasks.0.template.spec.restartPolicy", "OnFail",
     "spec.tasks.0.template.spec.restartPolicy", "did you mean OnFailure?"),
    ("ResourceFlavor/h200", "spec.nodeLabels", GONE, "spec", "at least one nodeLabel is required"),
    ("Secret/keys", "data", {"a": "not base64!"}, "data.a", "is not base64"),
    ("Service/llm", "spec.ports.0.nodePort", 80, "spec.ports.0.nodePort", "must be 30000 to 32767"),
    ("HorizontalPodAutoscaler/llm", "spec.scaleTargetRef.kind", "Deploymnt",
     "spec.scaleTargetRef.kind", "did you mean Deployment?"),
    # resources
    ("Deployment/llm", f"{POD}.resources.limits", {"nvidia.com/gpu": 16}, f"{POD}.resources.limits.nvidia.com/gpu",
     "one pod asks for 16 GPUs, and a node has 8"),
    ("Deployment/llm", f"{POD}.resources", {"limits": {"nvidia.com/gpu": 7}},
     f"{POD}.resources.limits.nvidia.com/gpu", "this asks for 7 GPUs on 8-GPU nodes with tp=4: 3 of them"),
    ("Deployment/llm", f"{POD}.resources", {"limits": {"nvidia.com/gpu": 2}},
     f"{POD}.resources.limits.nvidia.com/gpu", "tp=4 and pp=1 need 4 GPUs, and the pod asks for 2"),
    ("Deployment/llm", f"{POD}.resources", {"limits": {"nvidia.com/gpu": "500m"}},
     f"{POD}.resources.limits.nvidia.com/gpu", "GPUs are whole"),
    ("Deployment/llm", f"{POD}.resources.requests.cpu", "32", f"{POD}.resources.requests.cpu", "than the limit"),
    ("Deployment/llm", f"{POD}.resources.limits.memory", "64GB", f"{POD}.resources.limits.memory", "a quantity"),
    ("Job/train", "spec.minAvailable", 3, "spec.minAvailable", "3 is more than the 2 pods of all tasks"),
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
    ("Service/llm", "spec.ports.0.targetPort", "https", "spec.ports.0.targetPort", "no port https; did you mean"),
    ("Service/llm", "spec.selector", {"app": "lm"}, "spec.selector", "no pod has the labels app=lm"),
    ("ServiceMonitor/llm", "spec.endpoints.0.port", "metrics", "spec.endpoints.0.port", "has no port metrics"),
    ("Deployment/llm", f"{POD}.volumeMounts.0.name", "shn", f"{POD}.volumeMounts.0.name", "no volume shn; did you"),
    ("Deployment/llm", f"{POD}.readinessProbe.httpGet.port", "web",
     f"{POD}.readinessProbe.httpGet.port", "the container has no port web"),
]  # fmt: skip


def test_whole_manifests_have_no_problem() -> None:
    assert check_bodies(WHOLE) == []


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case[0]} {case[1]} {case[4][:20]}")
def test_a_broken_field_is_named_with_what_is_wrong(case: Break) -> None:
    is_named_at_its_field(WHOLE, case)


def test_there_are_many_ways_to_be_wrong() -> None:
    assert len(BROKEN) >= 30
    assert len({(case[0], case[1]) for case in BROKEN}) >= 30


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


@pytest.mark.parametrize(
    ("rule", "value", "kept"),
    [
        ("self.a <= self.b", {"a": 1, "b": 2}, True),
        ("self.a <= self.b", {"a": 3, "b": 2}, False),
        ("!has(self.a) || self.a in ['x', 'y']", {"a": "z"}, False),
        ("self.all(p, self.exists_one(q, p.n == q.n))", [{"n": 1}, {"n": 1}], False),
        ("size(self) > 1 ? self[0] == 'a' : true", ["b", "c"], False),
        ("self.filter(i, i > 2).size() == 1", [1, 2, 3], True),
        ("self == oldSelf", 1, True),
        ("self.unknownFunction()", 1, True),
    ],
)
def test_rules_of_schemas_are_evaluated(rule: str, value: Any, kept: bool) -> None:
    assert keeps_rule(rule, value) is kept


@pytest.mark.skipif(not CRDS.is_dir(), reason="the folder with the projects' own definitions is not here")
def test_whole_manifests_are_valid_against_the_projects_own_definitions() -> None:
    manifests, problems = check_files([FILE], crds=CRDS)
    assert len(manifests) == len(WHOLE)
    assert problems == []
