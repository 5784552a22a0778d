"""Kill processes of training jobs at random moments, and hold every job against one that nobody disturbed.

    python -m tests.cluster.kill_campaign --on local --times 40
    python -m tests.cluster.kill_campaign --on slurm --times 30 --minutes 15
    python -m tests.cluster.kill_campaign --on local --times 0 --check-nodes --minutes 60     # clean runs

Which process dies, when, and which jobs are cancelled afterwards is drawn from the seed. It fails where two own
one run, where something outlives a job, where a loss differs in any bit, and where a node is cordoned although none
is at fault.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from cumulo.cluster import launching
from cumulo.cluster.drivers.command import run_folder
from cumulo.cluster.job_file import job_from, resolved
from cumulo.cluster.job_store import JobRecord, JobStore, Target
from cumulo.cluster.node_health import NodeHealth
from cumulo.errors import CumuloError
from cumulo.train.run.log import read_log
from tests.cluster.job_watch import MARK, JobWatch, Seen, outlived, processes, ranks_of, seen
from tests.processes import ROOT

_OPTIONS = ["--set", "faults.most_restarts=1000", "--set", "device=cpu"]
_STILL_S = 300.0  # a job that does no step for so long after the last kill is lost
_CANCELLED = 0.25  # of the jobs
_TRAINING, _START_S = 0.6, 6.0  # of the moments, and the most that others come after what was before
Kill = Callable[[], None]


def kill(one: Seen) -> Kill:
    return lambda: os.kill(one.pid, signal.SIGKILL)


class Place(Protocol):
    """A target of jobs on this machine, whose own processes may be killed, too."""

    target: Target
    patience_s: float  # between the word that a job is cancelled and the end of its processes

    def victims(self, record: JobRecord, found: list[Seen]) -> dict[str, list[Kill]]:
        """What could die now, by its kind."""

    def work(self, record: JobRecord, found: list[Seen]) -> list[Seen]:
        """Processes that must not outlive the job."""

    def repair(self) -> None:
        """Start again what belongs to the target and not to the job."""

    def close(self) -> None: ...


class Local:
    target: Target = "local"
    patience_s = 0.0

    def __init__(self, folder: Path) -> None: ...

    def victims(self, record: JobRecord, found: list[Seen]) -> dict[str, list[Kill]]:
        work = self.work(record, found)
        ranks = {one.pid for one in ranks_of(run_folder(record), found)}
        shells = {one.pid for one in work if one.words[0] == "/bin/sh"}
        return {
            "supervisor": [kill(one) for one in found if "local_supervisor" in one.command],
            "shell": [kill(one) for one in work if one.pid in shells],
            "parent": [kill(one) for one in work if one.parent in shells and one.pid not in shells],
            "rank": [kill(one) for one in work if one.pid in ranks],
        }

    def work(self, record: JobRecord, found: list[Seen]) -> list[Seen]:
        return [one for one in found if one.environment.get("CUMULO_ATTEMPT", "").startswith(record.folder)]

    def repair(self) -> None: ...

    def close(self) -> None: ...


class Slurm:
    target: Target = "slurm"
    patience_s = 30.0  # KillWait, and what slurmctld needs to hear of the end

    def __init__(self, folder: Path) -> None:
        from tests.cluster.slurm_cluster import SlurmCluster

        self.cluster = SlurmCluster(folder / "slurm", nodes=3)
        self.cluster.__enter__()
        self._repairs: list[Kill] = []
        self._hurried_s = 0.0

    def victims(self, record: JobRecord, found: list[Seen]) -> dict[str, list[Kill]]:
        work = self.work(record, found)
        ranks = {one.pid for one in ranks_of(run_folder(record), found)}
        agents = filter(None, (seen(pid) for pid in {one.parent for one in work}))
        places = {place.node for place in record.places}
        return {
            "head": [self._controller],
            "node": [lambda name=name: self._node(name) for name in sorted(places)],  # type: ignore[misc]
            "slurmd": [lambda name=name: self._daemon(name) for name in sorted(places)],  # type: ignore[misc]
            "agent": [kill(one) for one in agents if one.words[0].startswith("slurmstepd")],
            "parent": [kill(one) for one in work if one.words[0].endswith("srun")],
            "script": [kill(one) for one in work if "slurm_script" in one.command],
            "rank": [kill(one) for one in work if one.pid in ranks],
        }

    def work(self, record: JobRecord, found: list[Seen]) -> list[Seen]:
        return [one for one in found if one.environment.get("SLURM_JOB_ID") == record.handle]

    def repair(self) -> None:
        for one in self._repairs:
            one()
        self._repairs = []

    def hurry(self, record: JobRecord) -> None:
        """Slurm lets a job that lost a node wait for two minutes. Being told so too often, it does not start it."""
        if record.state == "queued" and record.handle and time.monotonic() - self._hurried_s > 10.0:
            self._hurried_s = time.monotonic()
            words = ["scontrol", "update", f"JobId={record.handle}", "StartTime=now"]
            subprocess.run(words, capture_output=True, check=False)

    def close(self) -> None:
        self.cluster.__exit__()

    def _controller(self) -> None:
        self.cluster.stop_controller(signal.SIGKILL)
        self._repairs.append(self.cluster.start_controller)

    def _node(self, name: str) -> None:
        self.cluster.kill_node(name)
        self._repairs.append(lambda: self.cluster.start_node(name))

    def _daemon(self, name: str) -> None:
        self.cluster.kill_daemon(name)
        self._repairs.append(lambda: self.cluster.start_node(name))


class Ray:
    target: Target = "ray"
    patience_s = 30.0

    def __init__(self, folder: Path) -> None:
        from tests.cluster.ray_cluster import RayCluster, free_port

        self._made, self._port = RayCluster, free_port()
        self.cluster = RayCluster(port=self._port, head_cores=0, workers=3)
        self._broken: list[str] = []

    def victims(self, record: JobRecord, found: list[Seen]) -> dict[str, list[Kill]]:
        ranks = ranks_of(run_folder(record), found)
        return {
            "head": [self._head],
            "node": [lambda node=node: self._node(node) for node in self.cluster.workers],  # type: ignore[misc]
            "queue": [kill(one) for one in found if "ray::RayQueue" in one.command],
            "keeper": [kill(one) for one in found if "ray::JobKeeper" in one.command],
            "agent": [kill(one) for one in found if "ray::GangTask" in one.command],
            "rank": [kill(one) for one in ranks],
        }

    def work(self, record: JobRecord, found: list[Seen]) -> list[Seen]:
        actors = ("ray::JobKeeper", "ray::GangTask")
        return [one for one in found if record.folder in one.command or one.command.startswith(actors)]

    def repair(self) -> None:
        if "head" in self._broken:
            import ray

            ray.shutdown()
            self.cluster.__exit__()
            self.cluster = self._made(port=self._port, head_cores=0, workers=3)
        elif "node" in self._broken:
            self.cluster.workers.append(self.cluster.add())
        self._broken = []

    def close(self) -> None:
        self.cluster.__exit__()

    def _head(self) -> None:
        self.cluster.kill_all()
        self._broken.append("head")

    def _node(self, node: Any) -> None:
        self.cluster.kill(node)
        self._broken.append("node")


PLACES: dict[str, Callable[[Path], Place]] = {"local": Local, "slurm": Slurm, "ray": Ray}


class Campaign:
    def __init__(self, folder: Path, place: Place, seed: int, steps: int, check_nodes: bool) -> None:
        self.folder, self.place, self.draw, self.steps = folder, place, random.Random(seed), steps
        self.check_nodes = check_nodes
        self.store = JobStore(folder / "jobs")
        self.kills, self.ends, self.wrong = Counter[str](), Counter[str](), list[str]()
        self.looks = self.jobs = self.owners = 0
        self.slowest_end_s = self._looked_s = 0.0

    def expected(self) -> list[Any]:
        run = self.folder / "undisturbed"
        words = ["train", "examples/train-tiny.yaml", "--folder", str(run), "--steps", str(self.steps)]
        subprocess.run([sys.executable, "-m", "cumulo", *words, *_OPTIONS], check=True, capture_output=True)
        return learnt(run)

    def play(self, kills: int, expected: list[Any]) -> None:
        """One job, which dies so often."""
        self.jobs += 1
        record = self._submitted()
        cancelled = kills > 0 and self.draw.random() < _CANCELLED
        with JobWatch(self.folder, run_folder(record)) as watch:
            for _ in range(kills):
                self._wait_for_a_moment(record)
                if not self._kill_one(record):
                    break
            if cancelled:
                self._wait_for_a_moment(record)
                self._cancel(record)
            record = self._ended(record)
            left, seconds = outlived(lambda: self.place.work(record, self._found()), self.place.patience_s)
        self.slowest_end_s = max(self.slowest_end_s, seconds)
        self.looks, self.owners = self.looks + watch.looks, self.owners + watch.owners
        told = [*watch.wrong, *(f"process {one.pid} outlived the job: {one.command[:200]}" for one in left)]
        self.ends[record.state] += 1
        if record.state == "done" and learnt(run_folder(record)) != expected:
            told.append("its losses are not those of an undisturbed run")
        elif record.state not in ("done", "cancelled") or (record.state == "cancelled" and not cancelled):
            told.append(f"it is {record.state}: {record.reason}")
        if told:
            output = Path(record.folder, "output.log")
            tail = output.read_text("utf-8", "replace")[-3000:] if output.exists() else ""
            print(f"{record.job_id}: {told}\n{tail}", flush=True)
        self.wrong += [f"{record.job_id}: {one}" for one in told]

    def _submitted(self) -> JobRecord:
        options = ["--steps", str(self.steps), *_OPTIONS]
        more = {"ray": {"address": self.place.cluster.address}} if isinstance(self.place, Ray) else {}
        apart = {} if isinstance(self.place, Local) else {"per_node": 1}
        content = {
            "name": "tiny", "train": {"config": "train-tiny.yaml", "options": options},
            "devices": {"count": 2, "kind": "cpu", **apart}, "restart": {"most": 1000},
            "check_nodes": self.check_nodes, **more,
        }  # fmt: skip
        return launching.launch(
            resolved(job_from(content), ROOT / "examples"), self.place.target, self.store
        )[0]

    def _look(self, record: JobRecord) -> JobRecord:
        """Once in a second as users look, which also starts a supervisor that is missing."""
        if time.monotonic() - self._looked_s > 1.0:
            with suppress(CumuloError):
                launching.refreshed(self.store)
            self._looked_s = time.monotonic()
        record = self.store.jobs()[record.job_id]
        if isinstance(self.place, Slurm):
            self.place.hurry(record)
        return record

    def _found(self) -> list[Seen]:
        return processes(self.folder)

    def _wait_for_a_moment(self, record: JobRecord) -> None:
        """Some seconds, in which a job starts; or some steps, and a part of one."""
        log, begin_s = run_folder(record) / "log.csv", time.monotonic()
        seconds, step = self.draw.uniform(0.0, _START_S), len(read_log(log)) + self.draw.randint(1, 20)
        trains = self.draw.random() < _TRAINING
        while not self._look(record).ended and time.monotonic() - begin_s < (_STILL_S if trains else seconds):
            if trains and len(read_log(log)) >= step:
                time.sleep(self.draw.uniform(0.0, 0.3))
                return
            time.sleep(0.1)

    def _kill_one(self, record: JobRecord) -> bool:
        """Whether the job was there to be killed."""
        record = self._look(record)
        if record.ended:
            return False
        victims = self.place.victims(record, self._found())
        kind = self.draw.choice(sorted(name for name, some in victims.items() if some) or [""])
        if not kind:
            return True  # nothing of it is there at this moment
        step = len(read_log(run_folder(record) / "log.csv"))
        with suppress(ProcessLookupError):
            self.draw.choice(victims[kind])()
            self.kills[kind] += 1
            print(f"{record.job_id} {record.state} at step {step}: killed {kind}", flush=True)
        time.sleep(self.draw.uniform(0.0, 2.0))
        self.place.repair()
        return True

    def _cancel(self, record: JobRecord) -> None:
        with suppress(CumuloError):  # it has ended meanwhile
            launching.cancel(self.store, record.job_id)

    def _ended(self, record: JobRecord) -> JobRecord:
        begin_s, step = time.monotonic(), -1
        while not (record := self._look(record)).ended:
            if (now := len(read_log(run_folder(record) / "log.csv"))) != step:
                begin_s, step = time.monotonic(), now
            if time.monotonic() - begin_s > _STILL_S:
                self.wrong.append(
                    f"{record.job_id}: {record.state} for ever ({record.reason}) at step {step}"
                )
                launching.cancel(self.store, record.job_id)
                begin_s = time.monotonic()
            time.sleep(0.2)
        return record


def learnt(run: Path) -> list[Any]:
    return [(one.step, one.tokens, one.loss, one.gradient_norm) for one in read_log(run / "log.csv")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--on", choices=sorted(PLACES), default="local")
    parser.add_argument("--times", type=int, default=40, help="kills; 0: clean runs until the time is over")
    parser.add_argument("--minutes", type=float, default=60.0, help="no further job begins after so long")
    parser.add_argument("--each", type=int, default=5, help="kills of one job")
    parser.add_argument("--steps", type=int, default=120, help="of each job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-nodes", action="store_true", help="nodes are checked before each start")
    asked = parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="cumulo-kills-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ.update({MARK: name, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
        os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        place = PLACES[asked.on](folder)
        begin_s = time.monotonic()
        try:
            campaign = Campaign(folder, place, asked.seed, asked.steps, asked.check_nodes)
            expected = campaign.expected()
            while time.monotonic() - begin_s < 60 * asked.minutes and (
                not asked.times or campaign.kills.total() < asked.times
            ):
                campaign.play(
                    min(asked.each, asked.times - campaign.kills.total()) if asked.times else 0, expected
                )
        finally:
            place.close()
        closed = [one for one in NodeHealth(campaign.store).states().values() if one.closed]
    campaign.wrong += [f"{one.node} is {one.shown}: {one.reason}" for one in closed]
    print(f"on {asked.on}: {campaign.kills.total()} kills ({dict(campaign.kills)}) of {campaign.jobs} jobs "
          f"({dict(campaign.ends)}) with {campaign.owners} claims of owners, in {campaign.looks} looks and "
          f"{(time.monotonic() - begin_s) / 60:.1f} minutes; the last process of a job ended "
          f"{campaign.slowest_end_s:.1f} s after it at most")  # fmt: skip
    print(
        "\n".join(campaign.wrong)
        or "nothing was wrong: no two owners, no orphans, no other losses, no cordon"
    )
    sys.exit(1 if campaign.wrong else 0)


if __name__ == "__main__":
    main()
