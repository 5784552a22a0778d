"""What `cumulo plan train` prints: the ranking, the memory ledger, the step's parts, bytes, costs, and why."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from cumulo.cli.report import Row, table
from cumulo.plan.run_cost import RunCost
from cumulo.plan.run_stalls import Stalls
from cumulo.plan.search import Plan, SearchResult
from cumulo.plan.search_space import TrainGoal
from cumulo.plan.why import Change, bounds_of, loses_by
from cumulo.spec.model_file import plain

GIB = 2**30
_MOST_CHANGES = 8
_FLOPS = "model FLOPs: products and causal attention, ×3 for forward and backward"
_LINKS = {
    "tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel", "pp": "pipeline",
    "dp": "data parallel",
}  # fmt: skip


def rows(plan: Plan, goal: TrainGoal, cost: RunCost | None, stalls: Stalls) -> list[Row]:
    """The figures of one plan, as every report has them."""
    found = plan.estimate
    interval = found.interval
    result = [
        Row("step", found.step_s, "s", "lower", note=f"90%: {interval.low:.4g} to {interval.high:.4g} s"),
        Row("throughput", found.tokens_per_s, "tokens/s"),
        Row("each GPU", found.tokens_per_s / goal.cluster.gpus, "tokens/s"),
        Row("MFU", 100 * found.mfu, "%", note=_FLOPS),
        Row("HFU", 100 * found.hfu, "%", note="with what is recomputed"),
    ]
    if found.memory is not None:
        left = goal.memory_limit_bytes - found.memory.total
        free = f"{left / GIB:.1f} GiB are left" if left >= 0 else f"{-left / GIB:.1f} GiB too much"
        result.append(Row("memory", found.memory.total / GIB, "GiB", "lower", note=free))
        if found.memory.host:
            note = "for each GPU: what was offloaded; held against no limit"
            result.append(Row("host memory", found.memory.host / GIB, "GiB", "lower", note=note))
    result += _stall_rows(stalls)
    if cost is not None:
        result += [
            Row(
                "run",
                cost.days,
                "days",
                "lower",
                note=f"{cost.tokens:.3g} tokens, nothing fails; {cost.stalled_days:.2g} days of it stalled",
            ),
            Row("energy", cost.energy_mwh, "MWh", "lower", note="nodes at full load, without cooling"),
            Row(
                "price",
                cost.money,
                "$",
                "lower",
                note=f"${goal.cluster.device.price_per_hour:g} a GPU and hour",
            ),
        ]
    return result


def _stall_rows(stalls: Stalls) -> list[Row]:
    saved = f"{stalls.checkpoint_bytes / 1e9:,.3g} GB every {stalls.interval_s / 60:,.3g} min"
    return [
        Row(
            "data loading",
            stalls.data_s,
            "s/step",
            "lower",
            note=f"waited; a node reads {stalls.read_bytes_per_s / 1e6:,.3g} MB/s",
        ),
        Row(
            "checkpoints",
            stalls.checkpoint_s,
            "s/step",
            "lower",
            note=f"waited; {saved} stop training for {stalls.stop_s:.2g} s, written in {stalls.write_s:,.3g} s",
        ),
    ]


def as_dict(result: SearchResult, gains: Sequence[Change], stalls: Stalls) -> dict[str, Any]:
    """The rest of the JSON report."""
    return {
        "plans": [_plan(plan) for plan in result.plans],
        "stalls": asdict(stalls),
        "space": {"plans": result.enumerated, "too_large": result.too_large, "timed": result.timed},
        "changes": [{"what": change.what, "step_s": change.step_s, "gain": change.gain} for change in gains],
    }


def _plan(plan: Plan) -> dict[str, Any]:
    job, found = plan.job, plan.estimate
    return {
        "layout": plain(job.layout),
        "micro_batch": job.micro_batch,
        "micro_batches": job.micro_batches,
        "recompute": job.recompute,
        "step_s": found.step_s,
        "interval_s": [found.interval.low, found.interval.high],
        "tokens_per_s": found.tokens_per_s,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "breakdown_s": dict(found.breakdown),
        "memory_bytes": dict(found.memory.rows()) if found.memory else None,
        "host_bytes": found.memory.host if found.memory else 0,
        "bytes_sent": dict(found.link_bytes),
        "evidence": list(found.evidence),
    }


def show(
    out: Console,
    model: str,
    goal: TrainGoal,
    result: SearchResult,
    gains: Sequence[Change],
    cost: RunCost | None,
    stalls: Stalls,
) -> None:
    best = result.plans[0]
    job = best.job
    out.print(
        f"[bold]{model}[/bold] on {goal.cluster}: {job.global_batch:,} sequences of {job.sequence_length:,} tokens"
    )
    out.print(
        f"[bold green]{job.layout}[/bold green], micro-batch {job.micro_batch} ({job.micro_batches} a step), "
        f"{_RECOMPUTE.get(job.recompute, f'{job.recompute} recomputed')}"
    )
    out.print(table("", rows(best, goal, cost, stalls)))
    parts = (*best.estimate.breakdown, *stalls.rows())
    out.print(_shares("The step, and what is waited for between steps", parts, 1.0, "s"))
    if best.estimate.memory is not None:
        out.print(_shares("Memory of a GPU", best.estimate.memory.rows(), GIB, "GiB"))
    if best.estimate.link_bytes:
        sent = [(_LINKS.get(name, name), size) for name, size in best.estimate.link_bytes]
        out.print(_shares("Sent by a GPU in a step", sent, GIB, "GiB"))
    if len(result.plans) > 1:
        out.print(_ranking(result))
    _print_why(out, best, result, gains)


_RECOMPUTE = {"none": "nothing recomputed", "selective": "scores recomputed", "full": "all recomputed"}


def _shares(title: str, parts: Sequence[tuple[str, float]], unit: float, name: str) -> Table:
    result = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    result.add_column("")
    result.add_column("", justify="right")
    result.add_column("")
    result.add_column("", justify="right", style="dim")
    whole = sum(size for _, size in parts) or 1.0
    for part, size in sorted(parts, key=lambda entry: -entry[1]):
        if size:
            result.add_row(part, f"{size / unit:.3g}", name, f"{size / whole:.1%}")
    return result


def _ranking(result: SearchResult) -> Table:
    found = Table(
        title="Best of each mesh", title_justify="left", title_style="bold", box=None, header_style="dim"
    )
    found.add_column("layout")
    for heading in ("micro-batch", "recompute", "step", "MFU", "memory"):
        found.add_column(heading, justify="right")
    found.add_column("", style="dim")
    best = result.plans[0]
    for plan in result.plans:
        memory = f"{plan.estimate.memory.total / GIB:.1f} GiB" if plan.estimate.memory else ""
        found.add_row(
            str(plan.job.layout),
            str(plan.job.micro_batch),
            plan.job.recompute,
            f"{plan.estimate.step_s:.4g} s",
            f"{plan.estimate.mfu:.1%}",
            memory,
            "" if plan is best else loses_by(best, plan),
        )
    return found


def _print_why(out: Console, best: Plan, result: SearchResult, gains: Sequence[Change]) -> None:
    out.print("[bold]Why[/bold]")
    out.print(f"bounded by {'; '.join(bounds_of(best))}")
    for change in gains[:_MOST_CHANGES]:
        if change.gain >= 0.005:
            out.print(f"{change.what}: {change.gain:.1%} less time")
    if gains and max(change.gain for change in gains) < 0.005:
        out.print("no single change of network, links, memory, batch or layout would gain half a percent")
    for sentence in best.estimate.evidence:
        out.print(sentence, style="dim", markup=False)
    out.print(
        f"{result.enumerated:,} plans in the space; {result.too_large:,} of those looked at do not fit; "
        f"{result.timed:,} timed by playing their schedule",
        style="dim",
    )
