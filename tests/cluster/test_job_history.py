"""What is kept of the attempts of a job: why each ended, who failed first, what was repeated and what was lost."""

import json
import os
import socket
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from cumulo.cli.jobs import jobs
from cumulo.cluster.decide.jobs import TaskPlace
from cumulo.cluster.drivers import slurm_end
from cumulo.cluster.drivers.command import end_attempt, failed_first_in, run_folder
from cumulo.cluster.drivers.slurm import SlurmDriver
from cumulo.cluster.drivers.slurm_script import batch_script
from cumulo.cluster.job_file import job_from
from cumulo.cluster.job_history import job_history
from cumulo.cluster.job_store import JobPhase, JobRecord, JobStore
from cumulo.console.jobs_page import log_html
from cumulo.errors import ConfigError
from cumulo.train.run.log import RunLog, TrainRecord, read_starts
from cumulo.train.run.metrics import TrainMetrics

HUNG = "step 7 has taken more than 30 s: rank 2 held it up"
JOB = job_from({"name": "tiny", "train": {"config": "a.yaml"}, "devices": {"count": 4, "kind": "gpu"}})


def step(number: int) -> TrainRecord:
    return TrainRecord(number, 100 * number, 2.5, 0.0, 1.0, 1.0, None, 10.0, 10.0, 0.25, 0.0, 0.0)


def ran(
    record: JobRecord, *starts: tuple[int, int], monkeypatch: pytest.MonkeyPatch, at_s: tuple[float, ...]
):
    """The log of a run whose ranks started at these times, each after a step, and went on to another."""
    for (first, last), time_s in zip(starts, at_s, strict=True):
        monkeypatch.setattr("cumulo.train.run.log.time.time", lambda time_s=time_s: time_s)
        log = RunLog(run_folder(record), first, ranks=4)
        log.add([step(number) for number in range(first + 1, last + 1)])
        log.close()


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    """Of 4 GPUs on two nodes: it ran 100 s, was lost, waited 50 s, and ran 100 s to its end."""
    (tmp_path / "tiny-1").mkdir()
    places = tuple(TaskPlace(node) for node in ("n1", "n1", "n2", "n2"))
    phases = (
        JobPhase("queued", 0.0, (), 100.0, "its whole gang fits"),
        JobPhase("running", 100.0, places, 190.0, "asked to end"),
        JobPhase("stopping", 190.0, places, 200.0, f"ended with exit code 1 after step 7 ({HUNG})"),
        JobPhase("queued", 200.0, (), 250.0, "its whole gang fits"),
        JobPhase("running", 250.0, places, 350.0, "finished"),
    )
    return JobRecord("tiny-1", "k", "local", JOB, str(tmp_path / "tiny-1"), "/home", 0.0, state="done",
                     reason="finished", attempt=2, failures=1, phases=phases)  # fmt: skip


def test_a_history_says_what_was_repeated_and_which_gpu_hours_were_lost(
    record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(record, (0, 7), (5, 12), monkeypatch=monkeypatch, at_s=(110.0, 260.0))
    first, second = job_history(record).attempts
    assert (first.begin_s, first.end_s, first.nodes, first.devices) == (100.0, 200.0, "n1, n2", 4)
    assert first.failed_first == "rank 2" and HUNG in first.cause
    assert (first.first_step, first.steps_repeated) == (0, 2)  # 6 and 7
    assert (second.first_step, second.steps_repeated, second.cause) == (5, 0, "finished")
    # Steps take 10 s: 5 of the first attempt count, and 7 of the second.
    assert (first.lost_device_s, second.lost_device_s) == (4 * 50.0, 4 * 30.0)
    history = job_history(record)
    assert history.device_hours == pytest.approx(4 * 200 / 3600)
    assert (
        str(history)
        == "2 attempts, 2 steps repeated; 0.222 GPU hours used, 0.0889 of them in no step that counts"
    )


def test_restarts_within_an_attempt_are_attempts_of_the_ranks(
    record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(record, (0, 3), (2, 4), (4, 12), monkeypatch=monkeypatch, at_s=(110.0, 160.0, 260.0))
    with (run_folder(record) / "starts.log").open("a") as stream:
        why = "07:12:01 rank 3 was ended by SIGKILL; restarting all 4 processes (1 of 3)"
        stream.write(json.dumps({"time_s": 150.0, "why": why}) + "\n")
    found = job_history(record).attempts
    assert [(one.name, one.end_s, one.failed_first, one.steps_repeated) for one in found] == [
        ("1.1", 150.0, "rank 3", 1), ("1.2", 200.0, "rank 2", 0), ("2", 350.0, "", 0),
    ]  # fmt: skip
    assert [one.lost_device_s for one in found] == [4 * 30.0, 4 * 30.0, 4 * 20.0]


def test_what_a_job_on_slurm_wrote_down_counts_also_of_attempts_that_nobody_saw(
    record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks at Slurm a job may fail and start again; and who lost a node says nothing more."""
    seen = (JobPhase("queued", 0.0, (), 300.0), JobPhase("running", 300.0, (), 350.0, "finished"))
    record = replace(record, target="slurm", attempt=0, failures=0, phases=seen)
    output, notes = Path(record.folder, "output.log"), Path(record.folder, "attempts.jsonl")
    for begin_s, end_s, printed in (
        (10, None, ""),
        (100, 200, "srun: error: n2: task 3: Killed"),
        (250, 350, ""),
    ):
        with notes.open("a") as stream, output.open("a") as out:
            stream.write(json.dumps({"begin_s": begin_s, "nodes": "n[1-2]", "devices": 4}) + "\n")
            out.write(f"--- attempt ---\n{printed}\n")
        if end_s is not None:
            monkeypatch.setattr("cumulo.cluster.drivers.command.time.time", lambda end_s=end_s: end_s)
            end_attempt(Path(record.folder), "finished" if end_s == 350 else "ended with exit code 137")
    ran(record, (0, 7), (5, 12), monkeypatch=monkeypatch, at_s=(110.0, 260.0))
    lost, killed, last = job_history(record).attempts
    assert (lost.end_s, lost.cause, lost.first_step) == (100, "it could not say why: its node was lost", None)
    assert (
        lost.lost_device_s == 4 * 90 and killed.failed_first == "rank 3 on n2" and killed.steps_repeated == 2
    )
    assert (last.begin_s, last.end_s, last.cause, last.failed_first) == (250, 350, "finished", "")
    # The job has ended, and its restarts are not forgotten.
    monkeypatch.setattr(
        SlurmDriver, "_call", lambda self, program, *words, job: "COMPLETED" if program == "sacct" else ""
    )
    Path(record.folder, "end.json").write_text('{"state": "done", "failures": 1}')
    looked = SlurmDriver().look(record)
    assert (looked["state"], looked["attempt"], looked["failures"]) == ("done", 3, 1)


def test_a_node_that_slurm_took_out_at_once_is_named_by_the_next_attempt(
    record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm requeued the job before its script could say anything; n2 has come back meanwhile."""
    tool, folder = tmp_path / "bin" / "scontrol", Path(record.folder)
    tool.parent.mkdir()
    with socket.socket() as answers:
        answers.bind(("127.0.0.1", 0))
        answers.listen()
        node = f"NodeAddr=127.0.0.1 Port={answers.getsockname()[1]} SlurmdStartTime"
        times = [datetime.fromtimestamp(at_s).isoformat() for at_s in (50, 150)]
        lines = "".join(f"echo 'NodeName=n{number} {node}={at}'\n" for number, at in enumerate(times, 1))
        tool.write_text(f"#!/bin/sh\n[ $2 != node ] && exit\n{lines}")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        notes, output = folder / "attempts.jsonl", folder / "output.log"
        notes.write_text('{"begin_s": 100, "nodes": "n[1-2]", "devices": 4}\n')
        output.write_text("--- attempt 1 ---\nstep 7\n")
        os.utime(output, (200, 200))
        slurm_end.close_before(folder)
        slurm_end.close_before(folder)  # what is written down stays
    assert notes.read_text().count("end_s") == 1
    (lost,) = job_history(replace(record, target="slurm")).attempts
    assert (lost.end_s, lost.cause, lost.failed_first) == (200, "n2 was lost", "n2")


def test_a_job_whose_script_slurm_saw_killed_is_queued_again_as_often_as_its_file_allows(
    record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left there who could say what becomes of the job; whoever looks says it, once."""
    folder, called = Path(record.folder), list[tuple[str, ...]]()
    (folder / "job.yaml").write_text("name: tiny\ntrain: {config: a.yaml}\nrestart: {most: 1}\n")
    record = replace(record, target="slurm", handle="17", state="running")

    def call(self: SlurmDriver, program: str, *words: str, job: JobRecord) -> str:
        called.append(words)
        return "17|FAILED|NonZeroExitCode|" if program == "squeue" else ""

    monkeypatch.setattr(SlurmDriver, "_call", call)
    for state in ("queued", "failed"):
        with (folder / "attempts.jsonl").open("a") as notes:
            notes.write('{"begin_s": 1.0, "nodes": "n[1-2]", "devices": 4}\n')
        looked = SlurmDriver().look(record)
        assert looked["state"] == state and "was killed" in looked["reason"]
    assert SlurmDriver().look(record)["state"] == "failed"
    assert called.count(("requeue", "17")) == 1


def test_the_batch_script_writes_down_where_an_attempt_begins(record: JobRecord) -> None:
    script = batch_script(replace(record, target="slurm"))
    assert '"devices\\": 4}" \\\n  >> ' in script
    # A rank whose slurmstepd is killed before the rank has begun does not go on alone.
    assert "[ $PPID -ne 1 ] || exit 3\nexport CUMULO_RANKS_OF=$PPID" in script


@pytest.mark.parametrize(
    ("text", "who"),
    [
        (f"error: {HUNG}\nsrun: error: n1: task 0: Exited with exit code 4", "rank 2"),
        ("srun: error: n1: task 0: Exited with exit code 3\nsrun: error: n3: task 2: Killed", "rank 2 on n3"),
        ("error: rank 1 was ended by SIGKILL, after 3 restarts already", "rank 1"),
        ("saved a checkpoint", ""),
    ],
)
def test_who_failed_first_is_read_from_what_was_printed(text: str, who: str) -> None:
    assert failed_first_in(text) == who


def test_the_metrics_of_a_run_count_its_starts_and_what_was_repeated(
    record: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(record, (0, 7), (5, 12), monkeypatch=monkeypatch, at_s=(110.0, 260.0))
    assert [one["repeated"] for one in read_starts(run_folder(record))] == [0, 2]
    metrics = TrainMetrics(run_folder(record), "127.0.0.1", 0)
    try:
        metrics.update(step(13), 1)
        text = metrics.text()
    finally:
        metrics.close()
    assert 'cumulo:train_starts_total{run="run"} 2.0' in text
    assert 'cumulo:train_repeated_steps_total{run="run"} 2.0' in text
    assert 'cumulo:train_repeated_gpu_seconds_total{run="run"} 80.0' in text


def test_jobs_show_and_the_console_tell_the_history_of_a_finished_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = JobStore(tmp_path / "jobs")
    record, _ = store.submit(JOB, "local")
    for number in (1, 2):
        store.change(record, state="running", places=(TaskPlace("here"),), attempt=number, reason="it fits")
        reason = "finished" if number == 2 else f"ended with exit code 1 after step 7 ({HUNG})"
        store.change(record, state="done" if number == 2 else "queued", places=(), reason=reason)

    def asked(*words: str) -> None:
        jobs([*words], everything=True, replay=False, store=store.folder, json_file=None)

    asked("show", "tiny")
    told = capsys.readouterr().out
    assert "tiny-1 on local: done, finished" in told and "rank 2" in told and HUNG in told
    assert "2 attempts, 0 steps repeated" in " ".join(told.split())
    asked()
    assert "1 restart: `cumulo jobs show tiny-1` says why" in capsys.readouterr().out
    shown = log_html(store.find("tiny"))
    assert HUNG in shown and "2 attempts" in shown and "hours lost" in shown
    with pytest.raises(ConfigError, match="cumulo jobs show JOB"):
        asked("shwo", "tiny")
