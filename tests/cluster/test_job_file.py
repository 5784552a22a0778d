"""The job file: read strictly, checked before anything is submitted, and the same when read back."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cumulo.cli.launch import launch as launch_command
from cumulo.cluster.drivers.command import check_work, work_command
from cumulo.cluster.drivers.driver import TargetLost
from cumulo.cluster.drivers.slurm import SlurmDriver, refusal
from cumulo.cluster.drivers.slurm_script import batch_script
from cumulo.cluster.job_file import job_from, plain_job, read_job, resolved
from cumulo.cluster.job_settings import DeviceGroup
from cumulo.cluster.job_store import TARGETS, JobRecord, JobStore, Target
from cumulo.cluster.launching import explain, launch
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
        ({"devices": {"count": 0}}, r"devices\[0\].count must be 1 to 1,000,000"),
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


WRITTEN = """name: tiny
train:
  config: train-tiny.yaml
  options:
  - --set
  - steps=4
devices:
- count: 4
  kind: cpu
"""
SERVED = """name: web
serve:
  replicas: 3
devices: {count: 4}
"""


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (WRITTEN.replace("kind: cpu", "kind: h2000"), 9, "'h2000' is no known device; did you mean h200?"),
        (WRITTEN.replace("kind: cpu", "kind: A100_80GB"), 9, "did you mean a100-80gb?"),
        (WRITTEN.replace("kind: cpu", "kind: toaster"), 9, "known are cpu, gpu, a100-40gb"),
        (SERVED, 3, "serve.replicas 3 cannot share devices.count 4 equally: use another"),
        (SERVED.replace("3", "9"), 3, "or 9 devices"),
        (SERVED.replace("{count: 4}", "{count: 8, per_node: 2}"), 3, "or 6 or 12 devices"),
        (WRITTEN.replace("count: 4", "count: four"), 8, "devices[0].count must be a whole number, got 'four'"),
        (WRITTEN.replace("kind: cpu", "knid: cpu"), 9, "devices[0] has no setting 'knid'; did you mean 'kind'?"),
        (WRITTEN + "deadline: soon\n", 10, "deadline must be a time"),
        (WRITTEN.replace("train-tiny", "none"), 3, "none.yaml, which train.config names"),
        (WRITTEN.replace("--set", "--folder"), 5, "the folder of the run is `train: {folder: ...}`"),
        (WRITTEN + "  memory: 0GiB\n", 10, "devices.memory must be at least 1MiB"),
        (WRITTEN + "deadline: 0s\n", 10, "deadline must be more than 0"),
        (WRITTEN + "  per_node: 2\nelastic: {min: 1, max: 4}\n", 11, "elastic.min 1 is not a multiple"),
        (WRITTEN + "restart: {ways: []}\n", 10, "restart.ways names no way"),
        (WRITTEN + "slurm:\n  options: [--exclusive, constraint=ib]\n", 11, "option of sbatch"),
        (WRITTEN + 'slurm:\n  options: ["--x\\nrm -r y"]\n', 11, "option of sbatch"),
        (WRITTEN + "ray: {address: 'head:99999'}\n", 10, "the port of ray.address must be 1 to 65535"),
        (SERVED.replace("replicas: 3", "model: ''"), 3, "leave it out for the built-in model"),
        (SERVED.replace("replicas: 3", "autoscale: {prompt_tok_s: 1, output_tok_s: 1}"), 3, "needs min_replicas"),
        (
            SERVED.replace("replicas: 3", "max_replicas: 2\n  autoscale:\n   prompt_tok_s: -1\n   output_tok_s: 1"),
            5, "serve.autoscale.prompt_tok_s must be more than 0 and at most 1,000,000,000, got -1",
        ),
    ],
)  # fmt: skip
def test_a_broken_setting_is_named_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    (tmp_path / "train-tiny.yaml").write_text("")
    with pytest.raises(ConfigError) as error:
        read_job(path)
    assert str(error.value).startswith(f"{path}:{line}: ") and message in str(error.value)


@pytest.mark.parametrize("kind", ["cpu", "gpu", "h200", "h100", "h100-sxm", "a100", "mi300x", "v100", "l4"])
def test_devices_that_clusters_have_are_taken(kind: str) -> None:
    job_from({**TRAIN, "devices": {"count": 2, "kind": kind}})


@pytest.mark.parametrize(
    ("replicas", "devices"),
    [
        (2, {"count": 8}),
        (3, {"count": 1, "per_node": 1}),  # each replica gets one
        (0, {"count": 2}),
        (2, {"count": 8, "per_node": 2}),
    ],
)
def test_replicas_with_equally_many_devices_are_taken(replicas: int, devices: dict[str, int]) -> None:
    serve = {"replicas": replicas, "min_replicas": 0, "max_replicas": 4}
    job_from({"name": "web", "serve": serve, "devices": devices})


def launched(path: Path, store: Path) -> None:
    """`cumulo launch PATH --dry-run --store STORE`."""
    launch_command(
        path, on="local", dry_run=True, key=None, slots=None, policy=None, wait=False, out_folder=None,
        form="yaml", store=store,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("[--thread, '2']", "job.yaml:3: serve.options: No such option: --thread"),
        ("[--threads, two]", "job.yaml:3: serve.options: Invalid value for '--threads'"),
    ],
)
def test_options_of_a_service_are_checked_by_the_command_itself(
    tmp_path: Path, options: str, message: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SERVED.replace("replicas: 3", f"options: {options}"))
    with pytest.raises(ConfigError, match=message):
        launched(path, tmp_path)
    fits = SERVED.replace("replicas: 3", "options: [--threads, '1']").replace(
        "count: 4", "count: 1, kind: cpu"
    )
    path.write_text(fits)
    launched(path, tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("[--stepz, '4']", "job.yaml:4: train.options: No such option: --stepz"),
        ("[--steps=3, steps=4]", "train.options: .*unexpected extra argument"),
        ("[--set]", "train.options: Option '--set' requires an argument"),
    ],
)
def test_options_of_a_training_run_are_checked_by_the_command_itself(
    tmp_path: Path, words: str, message: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(WRITTEN.replace("options:\n  - --set\n  - steps=4", f"options: {words}"))
    (tmp_path / "train-tiny.yaml").write_text("")
    with pytest.raises(ConfigError, match=message):
        launched(path, tmp_path)


def test_a_job_that_is_made_in_a_program_is_checked_before_it_is_launched(tmp_path: Path) -> None:
    job = replace(job_from(TRAIN), devices=(DeviceGroup(2, "h2000"),))
    with pytest.raises(ConfigError, match="did you mean h200"):
        launch(job, "local", JobStore(tmp_path))
    assert not JobStore(tmp_path).jobs()


@pytest.mark.long
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
    broken.write_text("{" * 3000)
    with pytest.raises(ConfigError, match="not valid YAML: its brackets are nested too deeply"):
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


def test_names_of_folders_stay_in_their_line_of_the_batch_script() -> None:
    """sbatch reads a line's words as a shell does, and replaces % in the name of the output."""
    record = JobRecord("tiny-1", "my key", "slurm", job_from(TRAIN), "/50% of it's #1", "/home/m\\e", 0.0)
    lines = batch_script(record).splitlines()
    words = [shlex.split(line)[1:] for line in lines if line.startswith("#SBATCH ")]
    assert ["--output=/50%% of it's #1/output.log"] in words
    assert ["--comment=cumulo:my key"] in words and ["--chdir=/home/m\\e"] in words
    for change in ({"key": "k\n#x"}, {"folder": "/jobs\r\nid"}, {"working_folder": "/home\n/me"}):
        with pytest.raises(ConfigError, match="cannot contain a line end"):
            batch_script(replace(record, **change))


@pytest.mark.parametrize("target", TARGETS)
def test_a_line_end_in_a_folder_is_no_line_of_what_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    if target == "ray":
        pytest.importorskip("ray")
    folder = tmp_path / "a\n#SBATCH --wrap=id\nb"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for path in (ROOT / "examples" / "train-tiny.yaml", *(ROOT / "examples").glob("*.py")):  # with its data
        shutil.copy(path, folder)
    job = resolved(job_from({**TRAIN, "train": {"config": "train-tiny.yaml"}}), folder)
    try:
        said = explain(job, target, JobStore(folder / "store"))
    except ConfigError as error:
        assert target == "slurm" and "cannot contain a line end" in str(error)
        return
    if target == "local":
        assert str(folder / "train-tiny.yaml") in shlex.split(said, comments=True)
    else:
        list(yaml.safe_load_all(said))
        assert "\n#SBATCH" not in said


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


@pytest.mark.parametrize(
    "said", ["invalid partition specified: gpu", "Requested node configuration is not available"]
)
def test_a_refusal_is_told_where_sinfo_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    record = JobRecord("tiny-1", "abc", "slurm", job_from(TRAIN), "/jobs/tiny-1", "/home/me", 0.0)
    error = refusal("sbatch", f"sbatch: error: Batch job submission failed: {said}", record)
    assert said in str(error) and "Slurm's command sinfo was not found here" in str(error)
    with pytest.raises(ConfigError, match="squeue was not found here: launch from a login node"):
        SlurmDriver().submit(record)
