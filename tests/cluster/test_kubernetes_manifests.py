"""Every manifest that a job file becomes is valid, also against the projects' own definitions. What nodes cannot
run is refused in words."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cumulo.cluster.drivers.kubernetes.check import check_files, check_manifests
from cumulo.cluster.drivers.kubernetes.driver import facts_of
from cumulo.cluster.drivers.kubernetes.manifest_source import Manifest
from cumulo.cluster.drivers.kubernetes.manifests import (
    FORMATS,
    Files,
    assumed,
    job_manifests,
    write_manifests,
)
from cumulo.cluster.drivers.kubernetes.schemas import SchemaBook, book_with
from cumulo.cluster.job_file import JobFile, job_from, plain_job, read_job
from cumulo.cluster.served_shape import served_shape
from cumulo.errors import ConfigError
from cumulo.serve.observe.metrics import Metrics
from tests.cli.conftest import ROOT

pytestmark = pytest.mark.long

CRDS = ROOT.parent / "shared" / "data" / "crds"
TRAIN: dict[str, Any] = {
    "name": "pretrain",
    "train": {"config": str(ROOT / "examples" / "train-tiny.yaml")},
    "devices": [{"count": 32, "kind": "gpu", "per_node": 8}],
    "time_limit": "2h",
}
SERVE: dict[str, Any] = {
    "name": "llm",
    "serve": {
        "model": "org/model",
        "replicas": 2,
        "min_replicas": 0,
        "max_replicas": 6,
        "options": ["--tp", "4"],
    },
    "devices": [{"count": 8, "kind": "gpu"}],
}
FABRIC = {"quota": 128, "leafs": ["a", "b"], "rdma": "rdma/hca", "claim": "data"}


def render_chart(files: Files) -> list[Any]:
    """What Helm makes of a chart; there is no Helm here."""
    values = yaml.safe_load(files["values.yaml"])

    def value(match: re.Match[str]) -> str:
        return str(values[match[1]])

    made = []
    for name, text in files.items():
        if name.startswith("templates/"):
            plain = re.sub(r"\{\{ \.Values\.(\w+)(?: \| quote)? \}\}", value, text)
            made.append(yaml.safe_load(plain.replace('{{ "{{" }}', "{{")))
    return made


def kubernetes(base: dict[str, Any], **settings: Any) -> JobFile:
    return job_from(base | {"kubernetes": settings})


def wide_serve(**settings: Any) -> JobFile:
    """A replica over two nodes."""
    serve = SERVE["serve"] | {"options": ["--tp", "8", "--pp", "2"]}
    return kubernetes(SERVE | {"serve": serve, "devices": [{"count": 32, "kind": "gpu"}]}, **settings)


def split_serve(folder: Path, **settings: Any) -> JobFile:
    """A plan with prefill and decode apart."""
    path = folder / "plan.yaml"
    predicted = {"device": "h200", "devices": 16, "rate": 5.0, "slo_percentile": 99.0, "output_tok_s": 900.0}
    path.write_text(yaml.safe_dump({"tp": 4, "prefill": 1, "decode": 3, "planned_for": predicted}))
    serve = {"plan": str(path), "replicas": 3, "max_replicas": 6}
    return kubernetes(SERVE | {"serve": serve, "devices": [{"count": 16, "kind": "gpu"}]}, **settings)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobFile]:
    folder = tmp_path_factory.mktemp("plans")
    made = {}
    for scheduler in ("volcano", "kueue", "ray", "none"):
        for fabric in ({}, FABRIC):
            name = f"{scheduler}{'-fabric' if fabric else ''}"
            made[f"train-{name}"] = kubernetes(TRAIN, scheduler=scheduler, **fabric)
            made[f"serve-{name}"] = kubernetes(SERVE, scheduler=scheduler, inference_pool=True, **fabric)
            if scheduler != "ray":
                made[f"wide-{name}"] = wide_serve(scheduler=scheduler, **fabric)
                made[f"split-{name}"] = split_serve(folder, scheduler=scheduler, **fabric)
    scaling = {"prompt_tok_s": 8000, "output_tok_s": 600}
    own = SERVE | {"serve": SERVE["serve"] | {"autoscale": scaling}}
    made["serve-own"] = kubernetes(own, autoscaler="cumulo", gateway="http://gateway:8000")
    made["serve-hpa"] = kubernetes(SERVE, autoscaler="hpa", secret="own-keys", api_keys=True)
    made["train-one"] = kubernetes(TRAIN | {"devices": [{"count": 1}]}, scheduler="none")
    made["gang"] = read_job(ROOT / "examples" / "job-gang.yaml")
    made["serve-example"] = read_job(ROOT / "examples" / "job-serve-gpu.yaml")
    made["train-example"] = read_job(ROOT / "examples" / "job-train-gpu.yaml")
    return made


@pytest.fixture(scope="module")
def published() -> SchemaBook:
    """The definitions of the projects, as they published them."""
    return book_with(CRDS if CRDS.is_dir() else None)


def test_all_manifests_are_valid_against_every_schema(
    jobs: dict[str, JobFile], published: SchemaBook
) -> None:
    seen: set[str] = set()
    for name, job in jobs.items():
        manifests = [Manifest(name, body) for body in job_manifests(job)]
        assert check_manifests(manifests, published, 8, assumed(job)) == []
        seen |= {one.kind for one in manifests}
    assert seen >= {
        "Job", "PodGroup", "Queue", "HyperNode", "ClusterQueue", "LocalQueue", "ResourceFlavor", "Topology",
        "RayJob", "RayService", "LeaderWorkerSet", "InferencePool", "HorizontalPodAutoscaler", "ScaledObject",
        "ServiceMonitor", "PodDisruptionBudget", "Secret", "ConfigMap", "Deployment", "StatefulSet", "Service",
    }  # fmt: skip


def test_a_service_has_probes_a_drain_and_its_keys_from_a_secret(jobs: dict[str, JobFile]) -> None:
    bodies = job_manifests(jobs["serve-kueue-fabric"])
    (deployment,) = (body for body in bodies if body["kind"] == "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    server = spec["containers"][0]
    assert server["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert server["livenessProbe"]["httpGet"]["path"] == "/health"
    drain_s = int(server["command"][server["command"].index("--drain-timeout") + 1])
    assert spec["terminationGracePeriodSeconds"] > drain_s + int(
        server["lifecycle"]["preStop"]["exec"]["command"][1]
    )
    keys = [one["valueFrom"]["secretKeyRef"] for one in server["env"] if one["name"] == "CUMULO_FLEET_KEY"]
    assert keys == [{"name": "llm-keys", "key": "fleet-key"}]


def test_autoscalers_read_metrics_that_the_server_has(jobs: dict[str, JobFile]) -> None:
    text = Metrics("m").text(with_names=True).decode()
    hpa = next(one for one in job_manifests(jobs["serve-hpa"]) if one["kind"] == "HorizontalPodAutoscaler")
    assert f"\n{hpa['spec']['metrics'][0]['pods']['metric']['name']}{{" in text
    keda = next(one for one in job_manifests(jobs["serve-volcano"]) if one["kind"] == "ScaledObject")
    names = {
        word.split("{")[0]
        for trigger in keda["spec"]["triggers"]
        for word in trigger["metadata"]["query"].split("(")[1:]
    }
    assert names == {"cumulo:num_requests_waiting", "cumulo:num_requests_running"}
    assert all(f"\n{name}{{" in text for name in names)


@pytest.mark.parametrize(
    ("settings", "picker"),
    [
        ({}, {"name": "llm", "port": {"number": 80}, "failureMode": "FailOpen"}),
        ({"endpoint_picker": "epp"}, {"name": "epp", "port": {"number": 9002}}),
        ({"endpoint_picker": "epp:9003"}, {"name": "epp", "port": {"number": 9003}}),
    ],
)
def test_a_pool_without_an_endpoint_picker_lets_requests_through(
    settings: dict[str, str], picker: dict[str, Any]
) -> None:
    bodies = job_manifests(kubernetes(SERVE, inference_pool=True, **settings))
    (pool,) = (body for body in bodies if body["kind"] == "InferencePool")
    assert pool["spec"]["endpointPickerRef"] == picker


def test_a_replica_over_several_nodes_is_a_gang_with_a_leader(jobs: dict[str, JobFile]) -> None:
    bodies = job_manifests(jobs["wide-volcano-fabric"])
    group = next(body for body in bodies if body["kind"] == "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    gang = next(body for body in bodies if body["kind"] == "PodGroup")
    assert group["size"] == gang["spec"]["minMember"] == 2
    # Two leaders are no gang: the pods of one group of the set start together.
    (each,) = gang["spec"]["subGroupPolicy"]
    assert each["matchLabelKeys"] == ["leaderworkerset.sigs.k8s.io/group-index"] and each["subGroupSize"] == 2
    leader, worker = (group[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert "--remote-ranks 8" in " ".join(leader["command"])
    # A rank for each GPU of the pod; its engine tells it all else but the model.
    assert (
        worker["resources"]["limits"]["nvidia.com/gpu"]
        == leader["resources"]["limits"]["nvidia.com/gpu"]
        == 8
    )
    joins = ["--rank-of", "$(LWS_LEADER_ADDRESS):9100", "--rank-count", "8"]
    assert worker["command"] == leader["command"][:3] + joins
    keys = [[one for one in pod["env"] if one["name"] == "CUMULO_FLEET_KEY"] for pod in (leader, worker)]
    assert keys[0] == keys[1] != []  # without the engine's key no rank is let in
    assert {one["name"]: one.get("value") for one in worker["env"]}["NCCL_IB_DISABLE"] == "0"
    assert worker["resources"]["limits"]["rdma/hca"] == 1


def test_all_ranks_of_a_replica_start_and_each_has_its_device(jobs: dict[str, JobFile]) -> None:
    """What the commands start, against what the pods ask for: the server's own ranks and those that join."""
    seen = set()
    cores = SERVE["serve"] | {"options": ["--tp", "2", "--pp", "2"]}
    cpu = {"serve": cores, "devices": [{"count": 8, "kind": "cpu", "per_node": 2}]}
    experts = SERVE["serve"] | {"options": ["--dp=4", "--ep", "4"]}
    more = {
        "cpu": kubernetes(SERVE | cpu, scheduler="none"),
        "experts": kubernetes(SERVE | {"serve": experts}, scheduler="none"),
    }
    for job in (*jobs.values(), *more.values()):
        for body in job_manifests(job):
            if job.serve is None or body["kind"] not in ("Deployment", "StatefulSet", "LeaderWorkerSet"):
                continue
            if body["metadata"]["name"].endswith("-scaler"):
                continue
            here = 0
            pods = body["spec"]
            templates = [(1, pods.get("template"))]
            if body["kind"] == "LeaderWorkerSet":
                group = pods["leaderWorkerTemplate"]
                templates = [(1, group["leaderTemplate"]), (group["size"] - 1, group["workerTemplate"])]
            devices, joining, awaited = 0, 0, 0
            for count, template in templates:
                (one,) = template["spec"]["containers"]
                limits = one["resources"]["limits"]
                here = int(limits.get("nvidia.com/gpu") or limits["cpu"])
                words = one["command"]
                devices += count * here
                if "--rank-of" in words:
                    joining += count * int(words[words.index("--rank-count") + 1])
                    assert int(words[words.index("--rank-count") + 1]) == here
                if "--remote-ranks" in words:
                    awaited = int(words[words.index("--remote-ranks") + 1])
            assert devices == served_shape(job).ranks and joining == awaited
            seen.add((body["kind"], joining))
    assert seen >= {("LeaderWorkerSet", 8), ("LeaderWorkerSet", 2), ("Deployment", 0), ("StatefulSet", 0)}


def test_a_gang_that_volcano_may_start_with_fewer_pods_does_not_wait_for_the_others() -> None:
    whole, part = (
        job_manifests(kubernetes(TRAIN | elastic, scheduler="volcano"))[-1]["spec"]
        for elastic in ({}, {"elastic": {"min": 16, "max": 32}})
    )
    command = whole["tasks"][0]["template"]["spec"]["containers"][0]["command"]
    assert (
        whole["minAvailable"] == 4 and "--nnodes=4" in command and "--node-rank=$(VC_TASK_INDEX)" in command
    )
    command = part["tasks"][0]["template"]["spec"]["containers"][0]["command"]
    assert part["minAvailable"] == 2 and "--nnodes=2:4" in command and "--rdzv-backend=c10d" in command


def test_prefill_and_decode_scale_apart(jobs: dict[str, JobFile]) -> None:
    bodies = job_manifests(jobs["split-none"])
    prefill = next(body for body in bodies if body["kind"] == "StatefulSet")
    decode = next(body for body in bodies if body["kind"] == "Deployment")
    assert (prefill["spec"]["replicas"], decode["spec"]["replicas"]) == (1, 3)
    assert (
        "tcp:llm-prefill-0.llm-prefill:9200" in decode["spec"]["template"]["spec"]["containers"][0]["command"]
    )
    scaled = next(body for body in bodies if body["kind"] == "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] == "llm-decode"


@pytest.mark.parametrize("form", FORMATS)
def test_files_hold_the_same_objects_in_every_format(
    form: str, jobs: dict[str, JobFile], tmp_path: Path
) -> None:
    job = jobs["serve-kueue-fabric"]
    files = {
        path.relative_to(tmp_path).as_posix(): path.read_text("utf-8")
        for path in write_manifests(job, tmp_path, form)
    }
    if form == "helm":
        assert "{{ .Values.image }}" in files["templates/deployment-llm.yaml"]
        objects = render_chart(files)
    else:
        objects = [yaml.safe_load(text) for text in files.values()]
        assert check_files([tmp_path], exists=assumed(job))[1] == []
    assert objects == job_manifests(job)


def gpus(count: int) -> dict[str, Any]:
    return {"devices": [{"count": count, "kind": "gpu"}]}


@pytest.mark.parametrize(
    ("base", "settings", "words"),
    [
        (
            SERVE | gpus(7),
            {},
            "asks for 7 GPUs and 2 engines with tp=4, pp=1 need 8: one 8-GPU node is partly used",
        ),
        (
            SERVE | {"serve": {"options": ["--tp", "16"]}} | gpus(16),
            {},
            "tp=16 crosses nodes of 8 GPUs; use pp",
        ),
        (TRAIN | gpus(12), {}, "asks for 12 GPUs on 8-GPU nodes: one node is partly used"),
        (SERVE, {"quota": 4, "scheduler": "kueue"}, "asks for 8 of nvidia.com/gpu, and the ClusterQueue"),
        (TRAIN, {"quota": 16}, "asks for 32 of nvidia.com/gpu, and the Queue default has 16"),
    ],
)
def test_what_the_nodes_or_the_quota_cannot_hold_is_refused(
    base: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        job_manifests(job_from(base | {"kubernetes": settings}, checked=False))


def test_kubernetes_settings_survive_the_job_store() -> None:
    job = kubernetes(SERVE, **FABRIC, nccl={"NCCL_IB_GID_INDEX": "3"})
    assert job_from(plain_job(job)) == job


@pytest.mark.parametrize(
    ("kind", "status", "state"),
    [
        ("batch/v1 Job", {"conditions": [{"type": "Complete", "status": "True"}]}, "done"),
        ("batch/v1 Job", {"conditions": [{"type": "Failed", "status": "True", "message": "x"}]}, "failed"),
        ("batch/v1 Job", {"active": 2}, "running"),
        (
            "batch.volcano.sh/v1alpha1 Job",
            {"state": {"phase": "Pending", "message": "not enough GPUs"}},
            "queued",
        ),
        ("batch.volcano.sh/v1alpha1 Job", {"state": {"phase": "Completed"}}, "done"),
        ("ray.io/v1 RayJob", {"jobStatus": "RUNNING"}, "running"),
        ("apps/v1 Deployment", {"readyReplicas": 1}, "running"),
        ("apps/v1 Deployment", {}, "queued"),
    ],
)
def test_a_status_says_where_the_job_is(kind: str, status: dict[str, Any], state: str) -> None:
    version, name = kind.split()
    facts = facts_of({"apiVersion": version, "kind": name, "metadata": {}, "spec": {}, "status": status})
    assert facts["state"] == state
    assert facts["reason"]
