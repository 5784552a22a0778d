"""A training job that is launched from any folder: what is missing is said before it is submitted, what went wrong
afterwards by `cumulo jobs`, and its run is where its configuration says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cumulo.cluster import launching
from cumulo.cluster.decide.recovery import AttemptEnd, after_attempt
from cumulo.cluster.drivers import local_supervisor
from cumulo.cluster.drivers.command import last_error, output_file, run_folder
from cumulo.cluster.drivers.local import LocalDriver
from cumulo.cluster.drivers.local_supervisor import Supervisor
from cumulo.cluster.job_file import JobFile, read_job
from cumulo.cluster.job_store import JobStore
from cumulo.errors import ConfigError
from cumulo.train.decide.config import load_config
from tests.cli.conftest import cumulo_process
from tests.serve.running_server import wait_for

TRAIN = {"steps": 4, "schedule": {"warmup_steps": 0}, "data": {"sources": ["texts/own.txt"]}}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration, its data and a job file; the caller stands in another one."""
    monkeypatch.setattr(LocalDriver, "_wake", lambda self: None)
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (folder / "texts").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "texts" / "own.txt").write_text("A text of one's own.\n" * 50)
    (folder / "job.yaml").write_text("{name: own, train: {config: train.yaml}, devices: {count: 1}}")
    monkeypatch.chdir(elsewhere)
    return folder


def job(project: Path, **more: Any) -> JobFile:
    (project / "train.yaml").write_text(yaml.safe_dump(TRAIN | more))
    return read_job(project / "job.yaml")


def test_data_next_to_a_configuration_are_found_from_another_folder(project: Path) -> None:
    launching.launch(job(project), "local", JobStore(project / "jobs"))
    assert load_config(project / "train.yaml").data.sources == (str(project / "texts" / "own.txt"),)
    Path("texts").mkdir()
    Path("texts", "own.txt").write_text("The working directory goes first.")
    assert load_config(project / "train.yaml").data.sources == ("texts/own.txt",)


def test_a_job_whose_data_are_missing_is_refused_before_it_is_submitted(project: Path) -> None:
    store = JobStore(project / "jobs")
    with pytest.raises(ConfigError, match=r"no dataset at 'gone.txt', neither in .*elsewhere nor next to"):
        launching.launch(job(project, data={"sources": ["gone.txt"]}), "local", store)
    assert store.jobs() == {}


def test_the_folder_of_a_configuration_is_the_run_s_and_two_runs_never_share_it(project: Path) -> None:
    store = JobStore(project / "jobs")
    first, _ = launching.launch(job(project, folder="runs/own"), "local", store)
    assert run_folder(first) == Path.cwd() / "runs" / "own"
    again, is_new = launching.launch(job(project, folder="runs/own"), "local", store)
    assert (again.job_id, is_new) == (first.job_id, False)
    for ended in (False, True):
        if ended:
            run_folder(first).mkdir(parents=True)
            (run_folder(first) / "log.csv").touch()
            store.change(first, state="done")
        with pytest.raises(ConfigError, match=r"contains a run of the job own-1: write `train: \{folder: "):
            launching.launch(replace(job(project, folder="runs/own"), priority=1), "local", store)
    other, _ = launching.launch(job(project), "local", store)
    assert run_folder(other) == Path(other.folder, "run")


def test_jobs_say_that_a_job_failed_and_because_of_what(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["/bin/sh", "-c", "echo 'error: row 3 of [own] has no :text:' >&2; exit 2"]
    monkeypatch.setattr(local_supervisor, "ranks_command", lambda record, ranks: command)
    store = JobStore(project / "jobs")
    record, _ = launching.launch(job(project), "local", store)
    supervisor = Supervisor(store)
    wait_for(lambda: not supervisor.turn(), "the end of the job")
    assert store.find("own").reason == "ended with exit code 2: row 3 of [own] has no :text:"
    told = cumulo_process("jobs", "--store", str(store.folder)).out
    assert "own-1 (failed): ended with exit code 2: row 3 of [own] has no :text:" in told
    assert "No job is waiting or running; ended: 1 failed." in told
    assert last_error(output_file(record)) == "row 3 of [own] has no :text:"


def test_the_last_error_of_an_output_is_that_of_its_last_attempt(tmp_path: Path) -> None:
    output = tmp_path / "output.log"
    output.write_text(
        "--- attempt 1 ---\nerror: the first\n--- attempt 2 ---\nTraceback\n  x\nValueError: odd\nbye\n"
    )
    assert last_error(output) == "ValueError: odd"
    assert last_error(tmp_path / "none") == ""
    end = AttemptEnd(1, finished=False, step=7, error="ValueError: odd")
    assert after_attempt(end, 3, 3).reason.endswith("after 3 restarts (restart.most): ValueError: odd")
