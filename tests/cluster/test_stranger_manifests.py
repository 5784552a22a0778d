"""Manifests in a stranger's style, broken one field at a time: each break is named at its field. They were written
without a look at the checks."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cumulo.cluster.drivers.kubernetes.check import check_bodies, check_files
from cumulo.errors import ConfigError
from tests.cluster.broken_manifests import Break, broken, is_named_at_its_field, plain

FILE = Path(__file__).parent / "stranger_manifests.yaml"
WHOLE = list(yaml.safe_load_all(FILE.read_text("utf-8")))
VLLM = "spec.template.spec.containers.0"
SPEC = "spec.template.spec"
BROKEN: list[Break] = [
    # typos deep inside
    ("Deployment/vllm", f"{VLLM}.env.0.valueFrom.secretKeyRef", {"nmae": "hf-token", "key": "token"},
     f"{VLLM}.env.0.valueFrom.secretKeyRef.nmae", "did you mean name?"),
    ("Deployment/vllm", f"{VLLM}.lifecycle.preStop.exec.commands", ["x"],
     f"{VLLM}.lifecycle.preStop.exec.commands", "did you mean command?"),
    ("Deployment/vllm", f"{SPEC}.volumes.2.emptyDir.sizelimit", "16Gi", f"{SPEC}.volumes.2.emptyDir.sizelimit",
     "did you mean sizeLimit?"),
    ("HorizontalPodAutoscaler/vllm", "spec.behavior.scaleDown.stabilisationWindowSeconds", 60,
     "spec.behavior.scaleDown.stabilisationWindowSeconds", "did you mean stabilizationWindowSeconds?"),
    ("RayService/ray-llm", "spec.rayClusterConfig.headGroupSpec.template.spec.containers.0.port", [],
     "spec.rayClusterConfig.headGroupSpec.template.spec.containers.0.port", "did you mean ports?"),
    ("StatefulSet/embed", "spec.volumeClaimTemplates.0.spec.accessMode", ["ReadWriteOnce"],
     "spec.volumeClaimTemplates.0.spec.accessMode", "did you mean accessModes?"),
    # wrong words
    ("Deployment/vllm", f"{VLLM}.ports.0.protocol", "HTTP", f"{VLLM}.ports.0.protocol", "HTTP"),
    ("PersistentVolumeClaim/model-cache", "spec.accessModes.0", "ReadWriteAll",
     "spec.accessModes.0", "ReadWriteAll"),
    ("Service/vllm", "spec.type", "LoadBalancr", "spec.type", "did you mean LoadBalancer?"),
    ("ClusterQueue/research", "spec.preemption.reclaimWithinCohort", "Always",
     "spec.preemption.reclaimWithinCohort", "LowerPriority"),
    ("ClusterQueue/research", "spec.queueingStrategy", "FIFO", "spec.queueingStrategy", "StrictFIFO"),
    ("Job/finetune", "spec.completionMode", "indexed", "spec.completionMode", "Indexed"),
    ("Job/pretrain", "spec.policies.0.action", "RestartJobs", "spec.policies.0.action", "RestartJob"),
    ("Deployment/vllm", f"{SPEC}.volumes.2.emptyDir.medium", "RAM", f"{SPEC}.volumes.2.emptyDir.medium", "Memory"),
    ("Deployment/vllm", f"{SPEC}.tolerations.0.effect", "NoScheduling", f"{SPEC}.tolerations.0.effect",
     "did you mean NoSchedule?"),
    # quantities
    ("Deployment/vllm", f"{VLLM}.resources.limits.memory", "256GiB", f"{VLLM}.resources.limits.memory", "quantity"),
    ("PersistentVolumeClaim/model-cache", "spec.resources.requests.storage", "500 Gi",
     "spec.resources.requests.storage", "quantity"),
    ("Deployment/vllm", f"{VLLM}.resources.requests.memory", "512Gi", f"{VLLM}.resources.requests.memory", "limit"),
    ("Deployment/vllm", f"{VLLM}.resources.requests.memory", "128m", f"{VLLM}.resources.requests.memory", "128m"),
    ("Job/finetune", f"{VLLM}.resources.requests", {"nvidia.com/gpu": 4},
     f"{VLLM}.resources.requests.nvidia.com/gpu", "limit"),
    # selectors, ports, references
    ("PodDisruptionBudget/vllm", "spec.selector.matchLabels", {"app": "vllm"}, "spec.selector.matchLabels",
     "no pod has the labels app=vllm"),
    ("ServiceMonitor/vllm", "spec.selector.matchLabels", {"app": "vllm"}, "spec.selector.matchLabels",
     "no Service has the labels app=vllm"),
    ("Service/vllm", "spec.ports.0.targetPort", 8080, "spec.ports.0.targetPort", "8080"),
    ("Deployment/vllm", f"{VLLM}.livenessProbe.httpGet.port", 9000, f"{VLLM}.livenessProbe.httpGet.port", "9000"),
    ("Deployment/vllm", f"{SPEC}.volumes.0.persistentVolumeClaim.claimName", "model-cahce",
     f"{SPEC}.volumes.0.persistentVolumeClaim.claimName", "did you mean model-cache?"),
    ("Deployment/vllm", f"{VLLM}.volumeMounts.1.name", "conf", f"{VLLM}.volumeMounts.1.name", "no volume conf"),
    ("Deployment/vllm", f"{SPEC}.initContainers.0.volumeMounts.0.name", "caches",
     f"{SPEC}.initContainers.0.volumeMounts.0.name", "did you mean cache?"),
    ("Deployment/vllm", f"{VLLM}.env.1.valueFrom.configMapKeyRef.key", "LOGLEVEL",
     f"{VLLM}.env.1.valueFrom.configMapKeyRef.key", "did you mean LOG_LEVEL?"),
    ("HorizontalPodAutoscaler/vllm", "spec.scaleTargetRef.name", "vllm-server", "spec.scaleTargetRef.name",
     "there is no Deployment vllm-server"),
    ("ScaledObject/batch", "spec.scaleTargetRef.kind", "Deployment", "spec.scaleTargetRef.name",
     "there is no Deployment embed"),
    ("StatefulSet/embed", "spec.serviceName", "embeddings", "spec.serviceName", "there is no Service embeddings"),
    ("Deployment/vllm", f"{SPEC}.serviceAccountName", "runer", f"{SPEC}.serviceAccountName",
     "did you mean runner?"),
    ("Service/vllm", "metadata.namespace", "inferrence", "spec.selector", "in the namespace inferrence"),
    # queues and gangs
    ("Job/finetune", "metadata.labels", {}, "metadata.labels.kueue.x-k8s.io/queue-name", "suspend"),
    ("Job/finetune", "spec.parallelism", 4, "metadata.labels.kueue.x-k8s.io/queue-name", "asks for 32"),
    # versions, names, values
    ("HorizontalPodAutoscaler/vllm", "apiVersion", "autoscaling/v2beta2", "apiVersion", "autoscaling/v2"),
    ("Deployment/vllm", "apiVersion", "extensions/v1beta1", "apiVersion", "apps/v1"),
    ("Deployment/vllm", f"{VLLM}.env.2", {"name": "NCCL_DEBUG", "vlaue": "INFO"}, f"{VLLM}.env.2.vlaue", "value"),
    ("Deployment/vllm", f"{VLLM}.env.2.name", "HF_TOKEN", f"{VLLM}.env.2", "HF_TOKEN"),
    # found missing in a second look
    ("Deployment/vllm", f"{VLLM}.startupProbe.httpGet.scheme", "http",
     f"{VLLM}.startupProbe.httpGet.scheme", "HTTP"),
    ("Deployment/vllm", "spec.strategy", {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}},
     "spec.strategy.rollingUpdate", "type: Recreate"),
    ("ScaledObject/batch", "spec.triggers.0.type", "prometeus", "spec.triggers.0.type", "did you mean prometheus?"),
    ("ScaledObject/batch", "spec.triggers.0.metadata", {"serverAddress": "http://p:9090", "query": "x"},
     "spec.triggers.0.metadata.threshold", "is required and missing"),
    ("Job/pretrain", "spec.tasks.1.name", "master", "spec.tasks.1.name", "task 0 is called master, too"),
    ("Job/pretrain", "spec.plugins", {"scv": []}, "spec.plugins.scv", "did you mean svc?"),
    # Ray
    ("RayService/ray-llm", "spec.serveConfigV2", "applications:\n  - name: llm\n    route_prefix: /\n",
     "spec.serveConfigV2", "import_path"),
    ("RayService/ray-llm", "spec.serveConfigV2",
     "applications:\n- name: llm\n  import_path: app:deployment\n  deployments:\n  - name: LLM\n"
     "    num_replica: 2\n", "spec.serveConfigV2", "did you mean num_replicas?"),
    ("RayService/ray-llm", "spec.serveConfigV2", "applications:\n  - name: llm\n import_path: x\n",
     "spec.serveConfigV2", "YAML"),
]  # fmt: skip


def test_a_strangers_manifests_have_no_problem() -> None:
    assert check_bodies(WHOLE) == []


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case[0]} {case[1]} {case[4][:20]}")
def test_a_strangers_mistake_is_named_at_its_field(case: Break) -> None:
    is_named_at_its_field(WHOLE, case)


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
    assert against(tmp_path, WHOLE) == []


@pytest.mark.parametrize(
    ("path", "value", "changed", "words"),
    [
        (f"{VLLM}.resources", {"limits": {"nvidia.com/gpu": 7}}, {},
         "nvidia.com/gpu: this asks for 7 GPUs on 8-GPU nodes with tp=4: 3 of them are never used"),
        (f"{VLLM}.resources", {"limits": {"nvidia.com/gpu": 2}}, {}, "needs 4 GPUs (tp=4), and this has 2"),
        (f"{VLLM}.args", ["--tensor-parallel-size=2"], {}, "args: --tp is 2, and the plan has tp=4"),
        ("spec.replicas", 3, {}, "spec.replicas: the plan has 2 replicas (8 GPUs), and this has 3"),
        ("spec.replicas", 2, {"replicas": 1, "prefill": 1, "decode": 2}, "has 1 prefill engines, and no object"),
        ("spec.replicas", 2, {"pp": 2}, "a replica of the plan needs 8 GPUs (tp=4, pp=2), and this has 4"),
    ],
)  # fmt: skip
def test_what_differs_from_the_plan_is_named(
    tmp_path: Path, path: str, value: Any, changed: dict[str, Any], words: str
) -> None:
    problems = against(tmp_path, broken(WHOLE, "Deployment/vllm", path, value), **changed)
    assert any(words in one for one in problems), problems


def test_a_file_that_is_no_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a plan that `cumulo plan serve --out` wrote"):
        check_files([FILE], plan=_written(tmp_path, "tp: 4\n"))
    with pytest.raises(ConfigError, match="cannot read the plan"):
        check_files([FILE], plan=tmp_path / "none.yaml")


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text, "utf-8")
    return path
