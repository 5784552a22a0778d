"""Jobs handed to kubectl, which is a small script here: once, again after their end, and kept while it refuses."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cumulo.cluster import launching
from cumulo.cluster.drivers.driver import TargetLost
from cumulo.cluster.job_file import JobFile, job_from
from cumulo.cluster.job_store import JobStore
from cumulo.errors import ConfigError
from tests.cli.conftest import ROOT

TRAIN = {"config": str(ROOT / "examples" / "train-tiny.yaml"), "options": ["--set", "layout.dp=1"]}
JOB: JobFile = job_from(
    {"name": "tiny", "train": TRAIN, "devices": {"count": 1}, "kubernetes": {"scheduler": "none"}}
)


class Kubectl:
    """Keeps the Job of the last apply in a file, and every call in another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.job, self.calls = folder, folder / "job.json", folder / "calls"
        folder.mkdir()
        made = {"metadata": {"annotations": {"cumulo.dev/submission": "WHOSE"}}, "status": {}}
        (folder / "made.json").write_text(json.dumps({"kind": "Job", "apiVersion": "batch/v1"} | made))
        self.says("")

    def says(self, error: str) -> None:
        script = f"""#!/bin/sh
echo "$1" >> {self.calls}
if [ -n "{error}" ]; then echo "{error}" >&2; exit 1; fi
case $1 in
  get) cat {self.job} 2>/dev/null;;
  apply) sed -n 's/.*cumulo.dev.submission: //p' > {self.folder}/whose
    sed "s/WHOSE/$(cat {self.folder}/whose)/" {self.folder}/made.json > {self.job};;
  delete) rm -f {self.job};;
esac
exit 0
"""
        (self.folder / "kubectl").write_text(script)
        (self.folder / "kubectl").chmod(0o755)

    def ends(self) -> None:
        body: dict[str, Any] = json.loads(self.job.read_text())
        body["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        self.job.write_text(json.dumps(body))

    def told(self) -> list[str]:
        found = self.calls.read_text().split() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return found


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    made = Kubectl(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


def test_a_job_that_has_ended_gives_its_name_to_the_next_one(kubectl: Kubectl, tmp_path: Path) -> None:
    store = JobStore(tmp_path / "store")
    launching.launch(JOB, "kubernetes", store)
    assert kubectl.told() == ["get", "apply"]
    kubectl.ends()
    launching.refreshed(store)
    assert store.jobs()["tiny-1"].state == "done" and kubectl.told() == ["get"]
    again, is_new = launching.launch(JOB, "kubernetes", store)
    assert is_new and (again.job_id, again.state) == ("tiny-2", "queued")
    assert kubectl.told() == ["get", "delete", "apply"]
    launching.refreshed(store)
    assert store.jobs()["tiny-2"].state == "queued"


def test_a_job_of_somebody_else_with_this_name_is_not_touched(kubectl: Kubectl, tmp_path: Path) -> None:
    launching.launch(JOB, "kubernetes", JobStore(tmp_path / "other"))
    kubectl.told()
    with pytest.raises(
        ConfigError, match=r"jobs\.batch/tiny is in the namespace default already, and is queued"
    ):
        launching.launch(JOB, "kubernetes", JobStore(tmp_path / "store"), key="mine")
    assert kubectl.told() == ["get"]


@pytest.mark.parametrize(
    "error",
    [
        "error: You must be logged in to the server (Unauthorized)",
        "Unable to connect to the server: x509: certificate has expired or is not yet valid",
        "The connection to the server 10.0.0.1:6443 was refused: connection refused",
    ],
)
def test_a_job_is_kept_while_the_cluster_does_not_take_it(
    kubectl: Kubectl, tmp_path: Path, error: str
) -> None:
    store = JobStore(tmp_path / "store")
    kubectl.says(error)
    with pytest.raises(TargetLost, match="the job is kept, and the next `cumulo jobs`"):
        launching.launch(JOB, "kubernetes", store)
    assert store.jobs()["tiny-1"].state == "submitting"
    kubectl.says("")
    launching.refreshed(store)
    launching.refreshed(store)
    assert store.jobs()["tiny-1"].state == "queued" and kubectl.told().count("apply") == 1
