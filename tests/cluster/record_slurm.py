"""Records 50 jobs on a real Slurm, for the rehearsal: its configuration, and the jobs as squeue lists them.

python -m tests.cluster.record_slurm first
"""

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.slurm_cluster import SlurmCluster
from tests.serve.running_server import wait_for

JOBS = 50
COLUMNS = "%i|%V|%S|%e|%l|%D|%C|%b|%Q|%u"
_SCHEDULING = (
    "Configuration data",
    "AccountingStorageType",
    "Priority",
    "SchedulerP",
    "SchedulerTy",
    "SLURM_VER",
)
_KEEP = "MinJobAge=3600\nSchedulerType=sched/backfill\n"  # squeue shall list the jobs that have ended


@dataclass(frozen=True)
class Run:
    seed: int
    nodes: int
    gpus: int  # of each node
    scheduling: str
    gangs: tuple[int, ...]  # nodes of a job, one of these
    longest_s: int
    over_s: float  # until the last job is submitted
    slack: float  # limits are up to this times what a job takes


RUNS = {
    "first": Run(1, 4, 4, "SchedulerParameters=bf_interval=10", (1, 1, 1, 2, 2, 3, 4), 50, 240.0, 4.0),
    # Kept apart while the policy was made: other nodes, sizes, load, times between jobs and order of priority.
    "second": Run(
        2, 6, 2, "PriorityType=priority/multifactor\nPriorityWeightJobSize=1000\nPriorityWeightAge=1000",
        (1, 1, 2, 3, 5), 45, 300.0, 2.5,
    ),
}  # fmt: skip


ROOT = Path(__file__).parents[2]
# Of each run: the file of its configuration, and that of its jobs. The first one is also an example.
RECORDS = {
    name: (folder / "slurm-config.txt", folder / "slurm-jobs.txt")
    for name, folder in (("first", ROOT / "examples/cluster"), ("second", Path(__file__).parent / "data"))
}


def record(run: Run) -> tuple[str, str]:
    """The configuration and the jobs."""
    draw = random.Random(run.seed)
    moments = sorted(draw.uniform(0, run.over_s) for _ in range(JOBS))
    with (
        tempfile.TemporaryDirectory() as folder,
        SlurmCluster(Path(folder) / "slurm", run.nodes, run.gpus, _KEEP + run.scheduling),
    ):
        began_s = time.monotonic()
        for moment_s in moments:
            seconds = round(5 * (run.longest_s / 5) ** draw.random())
            minutes = -(-round(seconds * draw.uniform(1.1, run.slack)) // 60)
            nodes, gpus = draw.choice(run.gangs), draw.randint(1, run.gpus)
            time.sleep(max(0.0, began_s + moment_s - time.monotonic()))
            _said(
                "sbatch", f"--nodes={nodes}", "--ntasks-per-node=1", f"--gres=gpu:{gpus}", f"--time={minutes}",
                f"--chdir={folder}", "--output=/dev/null", f"--wrap=sleep {seconds}",
            )  # fmt: skip
        wait_for(lambda: not _said("squeue", "--noheader"), "the end of all jobs", patience_s=1800)
        config = _said("scontrol", "show", "config").splitlines(keepends=True)
        jobs = _said("squeue", "--states=all", "--sort=i", "-o", COLUMNS)
        return "".join(line for line in config if line.startswith(_SCHEDULING)), jobs


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for path, text in zip(RECORDS[sys.argv[1]], record(RUNS[sys.argv[1]]), strict=True):
        path.write_text(text)
