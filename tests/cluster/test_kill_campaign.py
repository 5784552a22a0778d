"""The checker of the kill campaign sees what must not be, and a short campaign finds nothing of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.job_watch import MARK, JobWatch, outlived, processes
from tests.processes import ROOT
from tests.serve.running_server import wait_for


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("owner", "checkpoints"):
        (tmp_path / "run" / name).mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def ranks(run: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that say that they are rank 0 of the run."""
    words = [sys.executable, "-c", "import time; time.sleep(1000)", "train", str(run)]
    environment = os.environ | {MARK: str(run.parent), "RANK": "0"}
    found = [subprocess.Popen(words, env=environment) for _ in range(2)]
    yield found
    for one in found:
        one.kill()
        one.wait()


def test_two_gangs_and_two_owners_are_told(run: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    def claim(number: int, pid: int) -> None:
        text = json.dumps({"pid": pid, "released": False})
        (run / "owner" / f"{number:06}.json").write_text(text)

    with JobWatch(run.parent, run) as watch:
        wait_for(lambda: any("rank 0 is there 2 times" in one for one in watch.wrong), "the second gang")
        claim(1, ranks[0].pid)
        wait_for(lambda: watch.owners == 1, "the first owner")
        claim(2, ranks[1].pid)
        wait_for(lambda: any("of claim 1 lives" in one for one in watch.wrong), "the second owner")


def test_a_checkpoint_that_is_written_again_is_told(run: Path) -> None:
    with JobWatch(run.parent, run) as watch:
        path = run / "checkpoints" / "step-000000005"
        path.mkdir()
        looks = watch.looks
        wait_for(lambda: watch.looks > looks + 1, "a look")
        assert watch.wrong == []
        path.rename(run / "old")
        path.mkdir()
        wait_for(lambda: watch.wrong == ["step-000000005 was written twice"], "the word of it")


def test_what_outlives_a_job_is_found(run: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    assert {one.pid for one in outlived(lambda: processes(run.parent), 0.0)[0]} == {one.pid for one in ranks}
    for one in ranks:
        one.kill()
        one.wait()
    assert outlived(lambda: processes(run.parent), 0.0)[0] == []


@pytest.mark.thorough
def test_a_short_campaign_finds_nothing_wrong() -> None:
    words = ["-m", "tests.cluster.kill_campaign", "--times", "3", "--each", "3", "--steps", "40"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills" in done.stdout and "nothing was wrong" in done.stdout
