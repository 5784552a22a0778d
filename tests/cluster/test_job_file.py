"""The job file: read strictly, checked before anything is submitted, and the same when read back."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cumulo.cluster.drivers.command import check_work, work_command
from cumulo.cluster.drivers.driver import TargetLost
from cumulo.cluster.drivers.slurm import refusal
from cumulo.cluster.drivers.slurm_script import batch_script
from cumulo.cluster.job_file import job_from, plain_job, read_job, resolved
from cumulo.cluster.job_record import JobRecord
from cumulo.errors import ConfigError
from tests.cli.conftest import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("job-*.yaml"))
TRAIN: dict[str, Any] = {"name": "tiny", "train": {"config": "train-tiny.yaml"}, "devices": {"count": 2}}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_read_checked_and_read_back_the_same(path: Path) -> None:
    job = read_job(path)
    check_work(job)
    assert job_from(yaml.safe_load(yaml.safe_dump(plain_job(job)))) == job


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Tiny LM"}, "name must be lower-case"),
        ({"prioritty": 1}, "'prioritty'; did you mean 'priority'"),
        ({"train": None}, "this one has neither"),
        ({"serve": {}}, "this one has both"),
        ({"train": {}}, "train needs `config:`"),
        ({"devices": {"count": 0}}, "devices.count must be 1 or more"),
        ({"devices": {"count": 3, "per_node": 2}}, "not a multiple of per_node"),
        ({"devices": {"count": "two"}}, "devices.* must be a whole number"),
        ({"devices": {"memory": "8 gigs"}}, "8GiB"),
        ({"deadline": "soon"}, "deadline must be a time such as"),
        ({"elastic": {"min": 3, "max": 4}}, "elastic must contain devices.count 2"),
        ({"restart": {"ways": ["pray"]}}, "cannot be pray"),
        ({"ray": {"strategy": "SPRED"}}, "did you mean 'SPREAD'"),
        ({"ray": {"address": "10.0.0.7"}}, "ray.address must be HOST:PORT"),
        ({"ray": {"address": "http://10.0.0.7:abc"}}, "ray.address must be HOST:PORT"),
        ({"slurm": {"partition": "gpu; rm -rf x"}}, "slurm.partition must be letters"),
        ({"slurm": {"account": "a\nscancel -u me"}}, "slurm.account must be letters"),
        ({"tenant": ""}, "tenant must be letters"),
        ({"tenant": "my team"}, "tenant must be letters"),
        ({"time_limit": "0s"}, "time_limit 0s must be longer"),
        ({"time_limit": "1m", "save_before": "5m"}, "time_limit 1m must be longer than save_before, 5m"),
        ({"train": {"config": "a.yaml", "options": ["--steps 3"]}}, r"write \[--steps, '3'\]"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_from({**TRAIN, **changes}, "job.yaml")


def test_files_that_are_missing_or_no_yaml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the job file"):
        read_job(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [")
    with pytest.raises(ConfigError, match="not valid YAML: line"):
        read_job(broken)
    broken.write_text("name: tiny\ntenant: a\ndevices: {count: 2}\ntenant: b\n")
    with pytest.raises(ConfigError, match="line 4, column 1: tenant is given twice"):
        read_job(broken)
    (tmp_path / "folder").mkdir()
    broken.write_text(yaml.safe_dump({**TRAIN, "train": {"config": "folder"}}))
    with pytest.raises(ConfigError, match="folder is a folder, and the job file needs a file"):
        read_job(broken)
    broken.write_text(yaml.safe_dump(TRAIN))
    with pytest.raises(ConfigError, match=r"there is no .*train-tiny\.yaml"):
        read_job(broken)


def test_devices_that_do_not_fit_the_layout_are_refused() -> None:
    job = resolved(job_from({**TRAIN, "devices": {"count": 3}}), ROOT / "examples")
    with pytest.raises(ConfigError, match="has 2 ranks, and the job asks for 3 devices"):
        check_work(job)


def test_a_gang_is_tasks_that_must_be_on_one_node() -> None:
    job = job_from({**TRAIN, "devices": {"count": 16, "kind": "h200", "per_node": 8}, "deadline": "2h"})
    request = job.request("tiny-1", arrival_s=10.0)
    assert (request.tasks, request.gpus_per_task, request.devices) == (2, 8, ("h200",))
    assert request.deadline_s == 7210.0
    cores = job_from(TRAIN).request("tiny-1", 0.0)
    assert (cores.tasks, cores.gpus_per_task, cores.cpu_milli) == (2, 0, 1000)


def test_the_batch_script_says_all_that_slurm_must_know() -> None:
    content = {
        "name": "big", "train": {"config": "train-tiny.yaml", "options": ["--set", "layout.dp=16"]},
        "devices": [{"count": 16, "kind": "h100", "per_node": 8}, {"count": 1, "kind": "cpu"}],
        "time_limit": "90min", "slurm": {"partition": "gpu", "account": "lab", "options": ["--constraint=ib"]},
    }  # fmt: skip
    record = JobRecord("big-1", "abc", "slurm", job_from(content), "/jobs/big-1", "/home/me", 0.0)
    script = batch_script(record)
    for line in (
        "--comment=cumulo:abc", "--requeue", "--nodes=2", "--ntasks-per-node=8", "--gres=gpu:h100:8",
        "--time=0-01:30:00",
        "--signal=TERM@60", "--partition=gpu", "--account=lab", "--constraint=ib", "hetjob",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert "srun --het-group=0,1 --kill-on-bad-exit=1" in script
    assert " ".join(work_command(record)[1:]) in script


def test_an_elastic_gang_asks_slurm_for_a_range_of_nodes() -> None:
    content = {**TRAIN, "devices": {"count": 4, "per_node": 1}, "elastic": {"min": 2, "max": 6}}
    record = JobRecord("tiny-1", "abc", "slurm", job_from(content), "/jobs/tiny-1", "/home/me", 0.0)
    assert "#SBATCH --nodes=2-6\n" in batch_script(record)


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        ("Invalid account or account/partition combination specified", ConfigError, "refused account 'lab'"),
        ("Unable to contact slurm controller (connect failure)", TargetLost, "controller does not answer"),
        ("Protocol authentication error", TargetLost, "does not accept who you are"),
        ("Requested node configuration is not available", ConfigError, "sbatch refused: "),
    ],
)
def test_what_slurm_says_becomes_what_to_do(said: str, kind: type[Exception], told: str) -> None:
    job = job_from({**TRAIN, "slurm": {"account": "lab"}})
    record = JobRecord("tiny-1", "abc", "slurm", job, "/jobs/tiny-1", "/home/me", 0.0)
    error = refusal("sbatch", f"sbatch: error: Batch job submission failed: {said}", record)
    assert type(error) is kind and told in str(error) and said in str(error)
