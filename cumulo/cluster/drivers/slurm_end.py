"""The last line of a batch script: the ranks have ended, and the rule of all drivers says what becomes of the job.

    python -m cumulo.cluster.drivers.slurm_end JOB_FOLDER EXIT_CODE

Queues the job again (`scontrol requeue`) or ends with its exit code, and writes down which in `end.json`. Where a
node of the job does not answer, its loss is no failure of the job: Slurm takes the node out and requeues the job.
Slurm may do so before this has begun. A start that is not the first therefore calls it without an exit code: it
writes down the end of the attempt before, and the node that was lost.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from cumulo.base.files import write_whole
from cumulo.cluster.decide.recovery import AfterAttempt, AttemptEnd, after_attempt, own_exit_code
from cumulo.cluster.drivers.command import end_attempt, last_begin, last_error
from cumulo.cluster.job_file import job_from
from cumulo.cluster.job_progress import run_progress

_ANSWER_S = 5.0
_NOTICE_S = 600.0  # Slurm has requeued the job long before


def main(folder: Path, code: int) -> int:
    if code and (lost := lost_nodes(os.environ.get("SLURM_JOB_NODELIST", ""))):
        return _leave_to_slurm(folder, lost, code)
    after = settle(folder, code)
    print(after.reason, flush=True)
    if after.state == "again":
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        return 0
    return code


def settle(folder: Path, code: int | None) -> AfterAttempt:
    """What becomes of the job, which is written down. `code` None: its script was killed."""
    job = job_from(yaml.safe_load((folder / "job.yaml").read_text("utf-8")), checked=False)
    before = read_end(folder)
    run = folder / "run" if job.train is None or job.train.folder is None else Path(job.train.folder)
    progress = run_progress(run)
    error = last_error(folder / "output.log")
    finished = job.serve is not None or progress.finished
    end = AttemptEnd(own_exit_code(code), finished, progress.step, before.get("step", 0), error)
    after = after_attempt(end, before.get("failures", 0), job.restart.most)
    facts = {
        "state": after.state, "reason": after.reason, "step": progress.step,
        "failures": before.get("failures", 0) + after.counts,
    }  # fmt: skip
    write_whole(folder / "end.json", json.dumps(facts).encode())
    end_attempt(folder, after.reason)
    return after


def close_before(folder: Path) -> None:
    """Write down the end of an attempt that could not do so itself."""
    begun = last_begin(folder)
    if begun is None:
        return
    output = folder / "output.log"
    end_s = output.stat().st_mtime if output.exists() else None
    if lost := ",".join(lost_nodes(begun["nodes"], begun["begin_s"])):
        end_attempt(folder, f"{lost} was lost", lost, end_s)


def lost_nodes(nodes: str, since_s: float = float("inf")) -> list[str]:
    """Those whose slurmd does not answer, asked directly: Slurm itself may not know for minutes. Also those whose
    slurmd has started since."""
    shown = _scontrol("show", "node", nodes, "-o")
    usual = re.search(r"^SlurmdPort\s*=\s*(\d+)", _scontrol("show", "config"), re.M)
    lost = []
    for line in shown.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S+)", line))
        port = int(facts.get("Port") or (usual[1] if usual else 6818))
        if _time_s(facts.get("SlurmdStartTime", "")) > since_s:
            lost.append(facts["NodeName"])
            continue
        try:
            socket.create_connection((facts["NodeAddr"], port), timeout=_ANSWER_S).close()
        except OSError:
            lost.append(facts["NodeName"])
    return lost


def _leave_to_slurm(folder: Path, lost: list[str], code: int) -> int:
    """Say so, where this user may, and wait to be requeued; who was requeued does not return from here."""
    names = ",".join(lost)
    end_attempt(folder, f"{names} does not answer", names)
    print(f"{names} does not answer: the job is requeued without it", flush=True)
    subprocess.run(
        ["scontrol", "update", f"NodeName={names}", "State=DOWN", "Reason=slurmd does not answer"],
        capture_output=True, check=False,
    )  # fmt: skip
    time.sleep(_NOTICE_S)
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
    return code


def _time_s(text: str) -> float:
    """A time that Slurm printed; 0 where it printed None or Unknown."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _scontrol(*arguments: str) -> str:
    return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=False).stdout


def read_end(folder: Path) -> dict[str, Any]:
    """How the last attempt ended that could say so; one whose node was lost could not."""
    path = folder / "end.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


if __name__ == "__main__":
    if len(sys.argv) == 2:
        close_before(Path(sys.argv[1]))
    else:
        sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
