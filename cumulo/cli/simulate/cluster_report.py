"""How `cumulo simulate cluster` shows its runs: tables, rows, the log of decisions, the page."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from cumulo.base.nearest import did_you_mean
from cumulo.base.quantities import quantity
from cumulo.base.report import Row, grid
from cumulo.cluster.decide.decisions import Eviction, JobPlacement, Resize, Waits, plain
from cumulo.cluster.simulate.fill import PUBLISHED, Filling
from cumulo.cluster.simulate.outcome import ClusterRun
from cumulo.cluster.simulate.page import page
from cumulo.errors import ConfigError

Runs = Sequence[tuple[str, ClusterRun, float]]


def run_rows(name: str, run: ClusterRun, cpu_s: float) -> list[Row]:
    return [
        Row(f"{name}: mean JCT", run.mean_jct_s, "s", "lower"),
        Row(f"{name}: p99 JCT", run.percentile_jct_s(99), "s", "lower"),
        Row(f"{name}: mean wait", run.mean_wait_s, "s", "lower"),
        Row(f"{name}: makespan", run.makespan_s, "s", "lower"),
        Row(f"{name}: utilization", 100 * run.utilisation, "%"),
        Row(f"{name}: fragmentation of the free GPUs", 100 * run.fragmentation, "%", "lower"),
        Row(f"{name}: fairness", run.fairness, "", note="Jain's index over the tenants' mean slowdown"),
        Row(f"{name}: CPU time of the simulation", cpu_s, "s", "lower"),
        Row(f"{name}: slowest decision", 1e3 * run.slowest_decision_s, "ms", "lower"),
    ]


_KEY = (
    "JCT: job completion time, from arrival to end. use: share of the GPUs' time. fairness: Jain's index "
    "over the tenants' mean slowdown; 1 is even."
)


def comparison(runs: Runs) -> Table:
    headings = ["policy", "jobs", "mean JCT", "p99 JCT", "mean wait", "makespan", "use", "fairness"]
    # Columns that would be zero everywhere are left out: lines stay narrow.
    rare = {"evicted": [run.evictions for _, run, _ in runs], "moved": [run.resizes for _, run, _ in runs],
            "left": [len(run.unfinished) for _, run, _ in runs]}  # fmt: skip
    rare = {name: counts for name, counts in rare.items() if any(counts)}
    lines = [
        (
            name, f"{len(run.outcomes):,}", quantity(run.mean_jct_s, "s"), quantity(run.percentile_jct_s(99), "s"),
            quantity(run.mean_wait_s, "s"), quantity(run.makespan_s, "s"), f"{100 * run.utilisation:.1f} %",
            f"{run.fairness:.3f}", *(f"{counts[index]:,}" for counts in rare.values()),
        )
        for index, (name, run, _) in enumerate(runs)
    ]  # fmt: skip
    return grid((*headings, *rare), lines, caption=_KEY)


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
    for name, run, _ in runs:
        if run.unfinished:
            job, gpus = run.unfinished[0], sum(node.gpus for node in run.nodes)
            left = len(run.unfinished)
            lines.append(
                f"{left:,} job{' never ends' if left == 1 else 's never end'} under {name}; the first is "
                f"{job.job_id}, which needs {job.gpus:,g} of {gpus:,} GPUs"
            )
    return lines


def _left_out(count: int) -> str:
    why = "left out: the whole cluster is too small for"
    return f"1 job was {why} it" if count == 1 else f"{count:,} jobs were {why} them"


def tenants(name: str, run: ClusterRun) -> Table:
    lines = [
        (
            tenant, f"{row['jobs']:,}", f"{row['gpu_hours']:,.0f}", quantity(row["mean_jct_s"], "s"),
            quantity(row["mean_wait_s"], "s"), f"{row['mean_slowdown']:.2f}",
        )
        for tenant, row in sorted(run.per_tenant.items(), key=lambda item: (len(item[0]), item[0]))
    ]  # fmt: skip
    headings = ("tenant", "jobs", "GPU hours", "mean JCT", "mean wait", "mean slowdown")
    return grid(headings, lines, f"tenants under {name}")


Steps = dict[str, tuple[float, float]]  # of each job: its step, and the best there is, in seconds


_DONE = {JobPlacement: "it is placed", Eviction: "it is evicted", Resize: "it gets other nodes"}


def step_rows(name: str, steps: Steps) -> list[Row]:
    """How step times compare with the best possible; no rows where no gang ever ran."""
    if not steps:
        return []
    mean = statistics.fmean(step / best for step, best in steps.values())
    worst = max(step / best for step, best in steps.values())
    slow = sum(step > 1.05 * best for step, best in steps.values())
    return [
        Row(f"{name}: mean step time over the best possible", mean, "", "lower"),
        Row(f"{name}: worst step time over the best possible", worst, "", "lower"),
        Row(f"{name}: jobs more than 5% slower than possible", slow, "", "lower"),
    ]


def step_table(found: Sequence[tuple[str, Steps]]) -> Table:
    """Step times as the collective model predicts them, over those of a gang alone under one leaf switch."""
    lines = []
    for name, steps in found:
        mean, worst, slow = (row.value for row in step_rows(name, steps)) if steps else (None, None, None)
        told = (f"{mean:.3f}", f"{worst:.3f}", f"{slow}") if steps else ("–", "–", "–")
        lines.append((name, f"{len(steps):,}", *told))
    headings = ("policy", "gangs", "mean", "worst", "over 5% slower")
    return grid(headings, lines, "step time over the best possible")


def explanation(job_id: str, runs: Runs, steps: Sequence[tuple[str, Steps]]) -> str:
    """What happened to one job under each policy: when, where, why, and what its step takes."""
    by_policy = dict(steps)
    lines = []
    for name, run, _ in runs:
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


def filling_rows(found: Sequence[Filling], mixed: bool = False) -> list[Row]:
    """`mixed`: of a mix for which nothing is published."""
    known = {} if mixed else PUBLISHED
    return [
        Row(
            f"{one.policy}: GPUs allocated at {load}% load",
            round(value, 2),
            "%",
            more={"published": published},
        )
        for one in found
        for load, value, published in (
            (100, one.mean_at_100, known.get(one.policy, (None, None))[0]),
            (130, one.mean_at_130, known.get(one.policy, (None, None))[1]),
        )
    ]


def fillings(found: Sequence[Filling], mixed: bool = False) -> Table:
    known = {} if mixed else PUBLISHED
    lines = []
    for one in found:
        at_100, at_130 = ("" if it is None else f"{it:.2f} %" for it in known.get(one.policy, (None, None)))
        lines.append(
            (
                one.policy,
                f"{one.mean_at_100:.2f} %",
                at_100,
                f"{one.mean_at_130:.2f} %",
                at_130,
                f"{one.moves:,}",
            )
        )
    headings = ("packing rule", "at 100% load", "published", "at 130% load", "published", "moves")
    return grid(headings, lines)


def write_html(path: Path, runs: Runs) -> None:
    path.write_text(page([(name, run) for name, run, _ in runs]), "utf-8")


def write_log(path: Path, run: ClusterRun) -> None:
    with path.open("w", encoding="utf-8") as file:
        for at_s, decisions in run.log:
            for one in decisions:
                file.write(json.dumps({"at_s": at_s, **plain(one)}) + "\n")
