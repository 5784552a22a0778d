"""How `cumulo simulate cluster` shows its runs: tables, rows, the log of decisions, the page."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter

from rich.table import Table

from cumulo.base.figures import RunFigure, figure_table
from cumulo.base.nearest import did_you_mean
from cumulo.base.quantities import quantity
from cumulo.base.report import Row
from cumulo.cluster.decide.decisions import Eviction, JobPlacement, Resize, Waits, plain
from cumulo.cluster.simulate.fill import PUBLISHED, Filling
from cumulo.cluster.simulate.outcome import ClusterRun
from cumulo.cluster.simulate.page import FIGURES, KEY
from cumulo.cluster.simulate.slurm_record import SlurmRehearsal
from cumulo.errors import ConfigError

Runs = Sequence[tuple[str, ClusterRun]]
Steps = dict[str, tuple[float, float]]  # of each job: its step, and the best there is, in seconds
_DONE = {JobPlacement: "it is placed", Eviction: "it is evicted", Resize: "it gets other nodes"}
# Columns that would be zero everywhere are left out: lines stay narrow.
_RARE = (
    RunFigure("", lambda run: run.evictions, heading="evicted"),
    RunFigure("", lambda run: run.resizes, heading="moved"),
    RunFigure("", lambda run: len(run.unfinished), heading="left"),
)
_TENANTS = (
    RunFigure("", lambda row: row["jobs"], heading="jobs"),
    RunFigure("", lambda row: row["gpu_hours"], heading="GPU hours", shown="{:,.0f}"),
    RunFigure("", lambda row: row["mean_jct_s"], "s", heading="mean JCT"),
    RunFigure("", lambda row: row["mean_wait_s"], "s", heading="mean wait"),
    RunFigure("", lambda row: row["mean_slowdown"], heading="mean slowdown", shown="{:.2f}"),
)
# Step times as the collective model predicts them, over those of a gang alone under one leaf switch.
STEPS = (
    RunFigure("", len, heading="gangs"),
    RunFigure(
        "mean step time over the best possible", lambda steps: _mean(_slower(steps)), "", "lower", "mean", "{:.3f}"
    ),
    RunFigure(
        "worst step time over the best possible", lambda steps: max(_slower(steps), default=None), "", "lower",
        "worst", "{:.3f}",
    ),
    RunFigure(
        "jobs more than 5% slower than possible",
        lambda steps: sum(ratio > 1.05 for ratio in _slower(steps)) if steps else None, "", "lower",
        "over 5% slower",
    ),
)  # fmt: skip


def _slower(steps: Steps) -> list[float]:
    return [step / best for step, best in steps.values()]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def comparison(runs: Runs) -> Table:
    rare = [one for one in _RARE if any(one.pick(run) for _, run in runs)]
    return figure_table("policy", runs, (*FIGURES, *rare), caption=KEY)


def tenants(name: str, run: ClusterRun) -> Table:
    by_name = sorted(run.per_tenant.items(), key=lambda item: (len(item[0]), item[0]))
    return figure_table("tenant", by_name, _TENANTS, f"tenants under {name}")


def never_ended(runs: Runs) -> list[str]:
    """One line for jobs that no policy can place, and one for each policy that leaves jobs behind."""
    lines = []
    if runs and (left_out := runs[0][1].impossible):
        first, nodes = left_out[0], runs[0][1].nodes
        kind = f" of {' or '.join(first.devices)}" if first.devices else ""
        able = [node for node in nodes if not kind or node.device in first.devices]
        lines.append(
            f"{_left_out(len(left_out))}. The first is "
            f"{first.job_id}, which needs {first.tasks:,} task{'' if first.tasks == 1 else 's'} with "
            f"{first.gpus_per_task} GPUs{kind} each; the "
            f"cluster has {sum(node.gpus for node in able):,}{' such' if kind else ''} GPUs, "
            f"{max((node.gpus for node in able), default=0)} on its largest node."
        )
    for name, run in runs:
        if run.unfinished:
            job, gpus = run.unfinished[0], sum(node.gpus for node in run.nodes)
            left = len(run.unfinished)
            lines.append(
                f"{left:,} job{' never ends' if left == 1 else 's never end'} under {name}; the first is "
                f"{job.job_id}, which needs {job.gpus:,g} of {gpus:,} GPUs"
            )
    return lines


def predicted(rehearsal: SlurmRehearsal) -> str:
    """How well a rehearsal of Slurm's own policy predicts the waits that really happened."""
    waits_s, left = [run.mean_wait_s for run in rehearsal.runs], rehearsal.record.left_out
    return (
        f"On Slurm these jobs waited {quantity(rehearsal.real_wait_s, 's')} on average; predicted are "
        f"{quantity(rehearsal.run.mean_wait_s, 's')} ({rehearsal.error:+.1%}), and {quantity(waits_s[0], 's')} to "
        f"{quantity(waits_s[-1], 's')} depending on when backfill looks. Half of the jobs are predicted within "
        f"{quantity(rehearsal.usual_miss_s, 's')}."
        + f" {left:,} jobs that have not ended are left out."
        * (left > 0)
    )


def prediction_rows(rehearsal: SlurmRehearsal) -> list[Row]:
    return [
        Row("slurm: mean wait that happened", rehearsal.real_wait_s, "s", "lower"),
        Row("slurm: error of the predicted mean wait", 100 * abs(rehearsal.error), "%", "lower"),
    ]


def _left_out(count: int) -> str:
    why = "left out: the whole cluster is too small for"
    return f"1 job was {why} it" if count == 1 else f"{count:,} jobs were {why} them"


def explanation(job_id: str, runs: Runs, steps: Sequence[tuple[str, Steps]]) -> str:
    """What happened to one job under each policy: when, where, why, and what its step takes."""
    by_policy = dict(steps)
    lines = []
    for name, run in runs:
        done = next((one for one in run.outcomes if one.job_id == job_id), None)
        if done is None:
            known = [one.job_id for one in run.outcomes]
            raise ConfigError(
                f"--explain: no job {job_id} ended under {name}{did_you_mean(job_id, known[:200])}"
            )
        lines.append(f"{job_id} under {name}: waited {quantity(done.wait_s, 's')}, ran until "
                     f"{quantity(done.end_s - done.arrival_s, 's')} after it arrived")  # fmt: skip
        for at_s, decisions in run.log:
            for one in decisions:
                if getattr(one, "job_id", None) != job_id:
                    continue
                if isinstance(one, Waits):
                    if not lines[-1].endswith(one.reason):
                        lines.append(f"  at {quantity(at_s, 's')} it waits: {one.reason}")
                    continue
                lines.append(f"  at {quantity(at_s, 's')} {_DONE[type(one)]}: {one.reason}")
                if isinstance(one, JobPlacement | Resize):
                    leaf = {node.name: node.leaf for node in run.nodes}
                    counts = Counter(leaf[place.node] for place in one.places)
                    where = ", ".join(f"{count} under {key or 'no switch'}" for key, count in counts.items())
                    lines.append(f"    {len(one.places)} tasks: {where}")
        if job_id in by_policy.get(name, {}):
            step_s, best_s = by_policy[name][job_id]
            lines.append(
                f"  its step takes {quantity(step_s, 's')}; alone under one leaf {quantity(best_s, 's')}"
            )
    return "\n".join(lines)


def _published(place: int) -> Callable[[Filling], float | None]:
    return lambda one: PUBLISHED[one.policy][place] if one.policy in PUBLISHED else None


# How full the cluster got, next to what was published.
FILLINGS = tuple(
    figure
    for place, load in enumerate((100, 130))
    for figure in (
        RunFigure(
            f"GPUs allocated at {load}% load", attrgetter(f"mean_at_{load}"), "%", heading=f"at {load}% load",
            shown="{:.2f} %",
        ),
        RunFigure(
            f"GPUs allocated at {load}% load, published", _published(place), "%", heading="published",
            shown="{:.2f} %",
        ),
    )
)  # fmt: skip


def log_text(run: ClusterRun) -> str:
    lines = ({"at_s": at_s, **plain(one)} for at_s, decisions in run.log for one in decisions)
    return "".join(json.dumps(line) + "\n" for line in lines)
