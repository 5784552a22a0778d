"""A recorded run of a Slurm cluster: its jobs as a trace, the waits that really happened, and its own settings.
`cumulo simulate cluster --policy slurm` rehearses it, and says how well that predicts the waits.

    scontrol show config > config.txt
    sacct -XPa -S now-7days -o JobID,Submit,Eligible,Start,End,Timelimit,ReqTRES,Priority,User > jobs.txt

Without slurmdbd, squeue lists the jobs that ended within MinJobAge:

    squeue --states=all -o "%i|%V|%S|%e|%l|%D|%C|%b|%Q|%u" > jobs.txt
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, median

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.slurm import SlurmScheduling, slurm_policy
from cumulo.cluster.simulate.job_speed import TraceJob
from cumulo.cluster.simulate.outcome import ClusterRun
from cumulo.cluster.simulate.play import PlayOptions, play
from cumulo.cluster.simulate.traces import TraceLine, once, read_lines
from cumulo.errors import ConfigError

# What squeue calls the columns of sacct.
_SQUEUE = {
    "submit_time": "submit", "start_time": "start", "end_time": "end", "time_limit": "timelimit", "nodes": "nnodes",
    "cpus": "ncpus", "tres_per_node": "reqtres",
}  # fmt: skip
_NEEDED = ("jobid", "submit", "start", "end", "timelimit")
_NEVER = ("unknown", "none", "n/a")
_NO_LIMIT = ("", "unlimited", "not_set", "partition_limit", "invalid")
_PHASES = 5  # moments within bf_interval at which backfill may look: no record tells them


@dataclass(frozen=True)
class SlurmRecord:
    settings: SlurmScheduling
    jobs: list[TraceJob]
    waits_s: dict[str, float]  # that really happened
    left_out: int  # jobs that have not started, or not ended


@dataclass(frozen=True)
class SlurmRehearsal:
    """`runs` differ in when backfill looks, and are in the order of their mean waits."""

    record: SlurmRecord
    runs: Sequence[ClusterRun]

    @property
    def run(self) -> ClusterRun:
        return self.runs[len(self.runs) // 2]

    @property
    def real_wait_s(self) -> float:
        """Mean of the jobs that the rehearsal could run."""
        return fmean(self.record.waits_s[one.job_id] for one in self.run.outcomes)

    @property
    def error(self) -> float:
        return self.run.mean_wait_s / max(self.real_wait_s, 1.0) - 1

    @property
    def usual_miss_s(self) -> float:
        """Half of the jobs' waits are predicted better than this."""
        return median(abs(one.wait_s - self.record.waits_s[one.job_id]) for one in self.run.outcomes)


def slurm_settings(text: str) -> SlurmScheduling:
    """From the output of `scontrol show config`."""
    known = dict(re.findall(r"^(\w+)\s*=[ \t]*(.*?)\s*$", text, re.M))
    if "SchedulerType" not in known:
        raise ConfigError("this is no configuration of Slurm: it needs what scontrol show config prints")
    given = dict(re.findall(r"(\w+)=(-?\d+)", known.get("SchedulerParameters", "")))
    usual = SlurmScheduling()

    def number(name: str, otherwise: float) -> float:
        return float(given.get(name, otherwise))

    # Without slurmdbd, Slurm does not let priorities grow with the age of a job.
    ages = known.get("PriorityType") == "priority/multifactor"
    ages = ages and known.get("AccountingStorageType") == "accounting_storage/slurmdbd"
    interval_s = number("bf_interval", usual.interval_s)  # -1: no backfill
    return SlurmScheduling(
        backfill=known["SchedulerType"] == "sched/backfill" and interval_s > 0,
        interval_s=max(1.0, interval_s),
        window_s=60 * number("bf_window", usual.window_s / 60),
        resolution_s=max(1.0, number("bf_resolution", usual.resolution_s)),
        most_tested=int(number("bf_max_job_test", usual.most_tested)),
        depth=int(number("default_queue_depth", usual.depth)),
        delay_s=max(1.0, number("batch_sched_delay", usual.delay_s)),
        age_weight=float(known.get("PriorityWeightAge", 0)) if ages else 0.0,
        max_age_s=_seconds(known.get("PriorityMaxAge", "")) or usual.max_age_s,
    )


def read_slurm_record(path: Path, settings: SlurmScheduling) -> SlurmRecord:
    """The jobs that ran to their ends. A job is one task on each of its nodes; its GPUs count, and its cores in a
    record where no job asks for GPUs."""
    lines = [_renamed(line) for line in read_lines(path)]
    if missing := [name for name in _NEEDED if name not in lines[0].fields]:
        raise ConfigError(f"{path} is no list of Slurm's jobs: the column {' and '.join(missing)} is missing")
    lines = [line for line in lines if "." not in line.text("jobid")]  # steps of jobs
    ended = [line for line in lines if line.text("start", "") and line.text("end", "")]
    if not ended:
        raise ConfigError(f"{path}: no job has started and ended")
    once(ended, (line.text("jobid") for line in ended), "jobid")
    submitted_s = [_moment(line, "eligible" if line.text("eligible", "") else "submit") for line in ended]
    begin_s = min(submitted_s) // settings.resolution_s * settings.resolution_s
    on_gpus = any("gpu" in line.text("reqtres", "") for line in ended)
    jobs, waits_s = [], {}
    for line, at_s in zip(ended, submitted_s, strict=True):
        start_s, job_id = _moment(line, "start"), line.text("jobid")
        waits_s[job_id] = wait_s = max(0.0, start_s - at_s)
        nodes, each = _asked(line, on_gpus)
        aged = settings.age_weight * min(1.0, wait_s / settings.max_age_s)
        request = JobRequest(
            job_id, nodes, each, arrival_s=at_s - begin_s, predicted_s=_limit_s(line),
            priority=round(line.real("priority", 0.0) - aged), tenant=line.text("user", "default"),
        )  # fmt: skip
        jobs.append(TraceJob(request, max(1.0, _moment(line, "end") - start_s)))
    jobs.sort(key=lambda job: job.request.arrival_s)
    return SlurmRecord(settings, jobs, waits_s, len(lines) - len(ended))


def rehearse(record: SlurmRecord, nodes: Sequence[ClusterNode], options: PlayOptions) -> SlurmRehearsal:
    """Plays the jobs of a record under Slurm's own policy."""
    runs = []
    for number in range(_PHASES if record.settings.backfill else 1):
        here = replace(record.settings, phase_s=number * record.settings.interval_s // _PHASES)
        looks = ((here.delay_s, 0.0), (here.interval_s, here.phase_s))
        changed = replace(options, interval_s=0.0, decide_after=looks)
        runs.append(play(nodes, record.jobs, slurm_policy(here), None, changed))
    if not runs[0].outcomes:
        raise ConfigError(
            "none of the jobs fits into the cluster: give its nodes with --nodes and --gpus-per-node"
        )
    return SlurmRehearsal(record, sorted(runs, key=lambda run: run.mean_wait_s))


def _renamed(line: TraceLine) -> TraceLine:
    fields = {
        _SQUEUE.get(name, name): "" if text.strip().lower() in _NEVER else text
        for name, text in line.fields.items()
    }
    return replace(line, fields=fields)


def _moment(line: TraceLine, name: str) -> float:
    try:
        return datetime.fromisoformat(line.text(name)).timestamp()
    except ValueError:
        raise line.wrong(
            name, f"must be a time such as 2026-11-19T08:30:00, got {line.text(name)!r}"
        ) from None


def _asked(line: TraceLine, on_gpus: bool) -> tuple[int, int]:
    """Nodes, and GPUs or cores on each."""
    asked = line.text("reqtres", "")
    total = dict(re.findall(r"(?:gres/)?(\w+)(?::[\w-]+)?=(\d+)", asked))  # sacct: of all nodes together
    nodes = int(total.get("node", 0)) or line.whole("nnodes", 1, least=1)
    if not on_gpus:
        return nodes, -(-(int(total.get("cpu", 0)) or line.whole("ncpus", 1)) // nodes)
    each = re.search(r"gpu(?::[a-zA-Z][\w-]*)?(?::(\d+))?(?=,|$)", asked)  # squeue: of each node
    return nodes, int(each[1] or 1) if each else -(-int(total.get("gpu", 0)) // nodes)


def _limit_s(line: TraceLine) -> float | None:
    text = line.text("timelimit", "")
    if text.lower() in _NO_LIMIT:
        return None
    if (seconds := _seconds(text)) is None:
        raise line.wrong("timelimit", f"must be a time such as 1-12:00:00, got {text!r}")
    return seconds


def _seconds(text: str) -> float | None:
    """[days-][hours:]minutes:seconds, as Slurm prints it."""
    if not re.fullmatch(r"(\d+-)?(\d+:)?\d+:\d+", text):
        return None
    days, _, clock = text.rpartition("-")
    return 86400.0 * int(days or 0) + sum(
        60.0**power * int(part) for power, part in enumerate(reversed(clock.split(":")))
    )
