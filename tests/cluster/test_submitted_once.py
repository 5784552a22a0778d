"""A job is handed over once: commands at the same time, an earlier job of the same file, an answer that was lost
and then cancelled. Slurm's commands are small scripts here, over a file of jobs; real Slurm is in test_slurm.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cumulo.cluster import launching
from cumulo.cluster.drivers.driver import TargetLost
from cumulo.cluster.job_file import JobFile, job_from, resolved
from cumulo.cluster.job_store import JobStore
from tests.cli.conftest import ROOT

TRAIN = {"config": "train-tiny.yaml", "options": ["--set", "layout.dp=1"]}
JOB: JobFile = resolved(job_from({"name": "tiny", "train": TRAIN}), ROOT / "examples")
GONE = "echo 'Unable to contact slurm controller' >&2; exit 1"


class SlurmScripts:
    """sbatch, squeue and scancel over a file of `number|name|comment|state`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, folder / "jobs"
        folder.mkdir()
        self.jobs.touch()
        self.write("scancel", f'sed -i "/^$1|/s/[A-Z]*$/CANCELLED/" {self.jobs}')
        self.write("sacct", "exit 0")
        self.answers()

    def write(self, name: str, script: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / name).chmod(0o755)

    def answers(self, after_sbatch: str = "") -> None:
        self.write(
            "squeue",
            "for word; do case $word in --jobs=*) one=${word#--jobs=};; --format=*) form=$word;; esac; done\n"
            "IFS='|'; while read number name key state; do\n"
            '  if [ -n "$one" ]; then [ "$one" = $number ] && echo "$number|$state|None|"\n'
            '  else case $form in *%j*) echo "$number|$name|$key";; *) echo "$number|$key";; esac; fi\n'
            f"done < {self.jobs}; exit 0",
        )
        self.write(
            "sbatch",
            # Wide enough a gap for another command to get between the question and the submission.
            f"sleep 0.2; number=$(( $(wc -l < {self.jobs}) + 1 )); script=$2\n"
            "name=$(sed -n 's/^#SBATCH --job-name=//p' $script); key=$(sed -n 's/^#SBATCH --comment=//p' $script)\n"
            f'echo "$number|$name|$key|PENDING" >> {self.jobs}\n{after_sbatch or "echo $number"}',
        )

    def is_gone(self) -> None:
        for name in ("squeue", "sbatch"):
            self.write(name, GONE)

    def listed(self) -> list[str]:
        return [line.split("|")[1] + " " + line.split("|")[3] for line in self.jobs.read_text().splitlines()]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmScripts:
    made = SlurmScripts(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


def test_commands_at_the_same_time_submit_a_job_once(slurm: SlurmScripts, tmp_path: Path) -> None:
    """A launch whose answer takes its time, and others that look at the jobs meanwhile."""
    store = JobStore(tmp_path / "store")
    store.submit(JOB, "slurm")
    with ThreadPoolExecutor(6) as pool:
        looks = [pool.submit(launching.refreshed, store) for _ in range(4)]
        launches = [pool.submit(launching.launch, JOB, "slurm", store) for _ in range(2)]
        assert {one.result()[0].handle for one in launches} == {"1"}
        assert all(one.result()[1] == [] for one in looks)
    assert slurm.listed() == ["tiny-1 PENDING"]


def test_a_file_can_be_launched_again_when_its_job_has_ended(slurm: SlurmScripts, tmp_path: Path) -> None:
    store = JobStore(tmp_path / "store")
    first, _ = launching.launch(JOB, "slurm", store)
    slurm.jobs.write_text(slurm.jobs.read_text().replace("PENDING", "COMPLETED"))
    launching.refreshed(store)
    assert store.jobs()[first.job_id].state == "done"
    second, is_new = launching.launch(JOB, "slurm", store)
    assert is_new and (second.job_id, second.handle, second.state) == ("tiny-2", "2", "queued")
    assert slurm.listed() == ["tiny-1 COMPLETED", "tiny-2 PENDING"]


def test_a_job_that_is_cancelled_after_its_answer_was_lost_does_not_run_on(
    slurm: SlurmScripts, tmp_path: Path
) -> None:
    store = JobStore(tmp_path / "store")
    slurm.answers(after_sbatch=GONE)
    with pytest.raises(TargetLost):
        launching.launch(JOB, "slurm", store)
    assert slurm.listed() == ["tiny-1 PENDING"] and store.jobs()["tiny-1"].state == "submitting"
    slurm.is_gone()
    assert launching.cancel(store, "tiny").reason.startswith("cancelled, if it is there: Slurm's controller")
    slurm.answers()
    launching.refreshed(store)
    launching.refreshed(store)
    assert slurm.listed() == ["tiny-1 CANCELLED"] and store.jobs()["tiny-1"].state == "cancelled"


def test_a_job_that_is_cancelled_before_slurm_answered_is_never_submitted(
    slurm: SlurmScripts, tmp_path: Path
) -> None:
    store = JobStore(tmp_path / "store")
    slurm.is_gone()
    with pytest.raises(TargetLost):
        launching.launch(JOB, "slurm", store)
    assert (
        launching.cancel(store, "tiny").state == "cancelled"
    )  # no answer is needed: it was never handed over
    slurm.answers()
    record, is_new = launching.launch(JOB, "slurm", store)  # the same file again is another job
    assert is_new and record.job_id == "tiny-2"
    launching.refreshed(store)
    assert slurm.listed() == ["tiny-2 PENDING"] and store.jobs()["tiny-1"].state == "cancelled"
