"""A service has as many processes and devices as its ranks need, on every target."""

import json
from pathlib import Path
from typing import Any

import pytest

from cumulo.cluster.drivers.slurm_script import batch_script
from cumulo.cluster.job_file import JobFile, job_from
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.cluster.served_shape import ServerTasks, replica_actor, served_shape, server_tasks
from cumulo.errors import ConfigError


def service(options: list[str], devices: dict[str, Any], **serve: Any) -> JobFile:
    return job_from({"name": "llm", "serve": {"model": "m", "options": options, **serve}, "devices": devices})


def script_of(job: JobFile) -> str:
    return batch_script(JobRecord("llm-1", "abc", "slurm", job, "/jobs/llm-1", "/home/me", 0.0))


@pytest.mark.parametrize(
    ("options", "ranks"),
    (
        ([], 1),
        (["--tp", "4"], 4),
        (["--tp=2", "--pp", "3"], 6),
        (["--ep", "8"], 8),  # alone, it sets tp
        (["--dp", "2", "--ep", "2"], 2),
        (["--tp", "2", "--dp", "2", "--ep", "4"], 4),
    ),
)
def test_ranks_are_counted_as_the_engine_counts_them(options: list[str], ranks: int) -> None:
    assert served_shape(service(options, {"count": ranks, "kind": "gpu"})).ranks == ranks


@pytest.mark.parametrize(
    ("options", "devices", "replicas", "tasks"),
    (
        (["--tp", "4"], {"count": 8, "kind": "gpu"}, 2, ServerTasks(2, 4, None)),
        (["--tp", "4"], {"count": 16, "kind": "gpu", "per_node": 8}, 4, ServerTasks(4, 4, 2)),
        ([], {"count": 2, "kind": "gpu", "per_node": 1}, 1, ServerTasks(2, 1, 1)),
        ([], {"count": 2, "kind": "cpu", "per_node": 1}, 1, ServerTasks(2, 1, 1)),
        ([], {"count": 8, "kind": "cpu"}, 2, ServerTasks(2, 4, None)),
    ),
)
def test_a_server_has_the_devices_of_its_ranks(
    options: list[str], devices: dict[str, Any], replicas: int, tasks: ServerTasks
) -> None:
    assert server_tasks(service(options, devices, replicas=replicas)) == tasks


def test_slurm_starts_a_task_for_each_server_and_not_for_each_gpu() -> None:
    job = service(["--tp", "4"], {"count": 16, "kind": "h200", "per_node": 8}, replicas=4)
    script = script_of(job)
    for line in ("--nodes=2", "--ntasks-per-node=2", "--gres=gpu:h200:8", "--cpus-per-task=4"):
        assert f"#SBATCH {line}\n" in script
    assert "SLURM_LOCALID * 4" in script  # each sees its own four GPUs
    assert "--replicas" not in script  # each is one of them
    anywhere = script_of(service(["--tp", "4"], {"count": 8, "kind": "gpu"}, replicas=2))
    assert "#SBATCH --ntasks=2\n" in anywhere and "#SBATCH --gpus-per-task=4\n" in anywhere


def test_training_has_a_task_for_each_gpu() -> None:
    job = job_from(
        {"name": "t", "train": {"config": "x.yaml"}, "devices": {"count": 16, "kind": "gpu", "per_node": 8}}
    )
    assert "#SBATCH --ntasks-per-node=8\n#SBATCH --gres=gpu:8\n#SBATCH --cpus-per-task=1\n" in script_of(job)


def test_a_ray_actor_has_a_gpu_for_each_rank() -> None:
    job = service(["--tp", "4"], {"count": 8, "kind": "h200"}, replicas=2)
    actor, per_node = replica_actor(job)
    assert actor == {"num_gpus": 4, "num_cpus": 0, "resources": {"accelerator_type:H200": 0.001}}
    assert per_node is None
    assert replica_actor(service(["--tp", "4"], {"count": 16, "kind": "gpu", "per_node": 8}))[1] == 2
    assert replica_actor(service([], {"count": 1, "kind": "cpu", "per_node": 1}, replicas=1)) == (
        {"num_cpus": 1}, 1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "options", "devices", "told"),
    (
        (server_tasks, ["--tp", "4"], {"count": 6, "kind": "gpu"}, "set devices.count to 8"),
        (server_tasks, ["--tp", "3"], {"count": 6, "kind": "gpu", "per_node": 2}, "use a multiple of 3"),
        (replica_actor, ["--tp", "4"], {"count": 8, "kind": "gpu", "per_node": 2}, "devices.per_node is 2"),
        (served_shape, ["--tp", "four"], {"count": 8, "kind": "gpu"}, "--tp must be a number of 1 or more"),
    ),
)
def test_what_cannot_be_divided_is_refused_with_what_would_work(
    call: Any, options: list[str], devices: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        call(service(options, devices, replicas=2))


def test_the_dry_run_of_ray_shows_the_devices_of_a_replica(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from cumulo.cluster.drivers.ray import RayDriver

    job = service(["--tp", "4"], {"count": 8, "kind": "gpu"}, replicas=2)
    record = JobRecord("llm-1", "abc", "ray", job, "/j", "/h", 0.0)
    shown = json.loads(RayDriver(JobStore(tmp_path)).explain(record))
    assert shown["serve"][1]["ray_actor_options"] == {"num_gpus": 4, "num_cpus": 0}
