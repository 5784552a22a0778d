"""What `cumulo plan train` prints: the ranking, memory, the parts of a step, network traffic, costs, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cumulo.base.quantities import GIB, MIB, between, column, percent, quantity
from cumulo.base.report import ReportTable, Row, grid, table
from cumulo.cli.shared.terminal import dim, marked
from cumulo.plan.memory.ledger import MemoryLedger
from cumulo.plan.search.run_cost import RunCost, Stalls
from cumulo.plan.search.search import Plan, SearchResult
from cumulo.plan.search.space import TrainGoal
from cumulo.plan.search.why import HALF_NETWORK, Change, bounds_of, loses_by
from cumulo.plan.time.phases import CommunicationPhase
from cumulo.spec.model_file import plain

_MOST_CHANGES = 8
_FLOPS = "model FLOPs: matrix products and causal attention, × 3 for forward and backward"
_LINKS = {
    "tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel", "pp": "pipeline",
    "dp": "data parallel",
}  # fmt: skip


def rows(plan: Plan, goal: TrainGoal, cost: RunCost | None, stalls: Stalls) -> list[Row]:
    """The figures of one plan, as every report has them, with their 90% intervals."""
    found, each, interval = plan.estimate, _each(goal), plan.estimate.interval
    low, high = interval.low / found.step_s, interval.high / found.step_s  # of the step's time
    dtype = plan.job.dtype
    peak = f"of {quantity(goal.cluster.device.flops(dtype) / 1e12, 'TFLOP/s')}, the peak in {dtype}"

    def rate(name: str, value: float, unit: str, note: str = "") -> Row:
        """Rates go the other way than the step's time."""
        return Row(name, value, unit, note=_range(value, 1 / high, 1 / low, unit) + note)

    result = [
        Row("step time", found.step_s, "s", "lower", note=_range(found.step_s, low, high, "s")),
        rate("throughput", found.tokens_per_s, "tokens/s"),
        rate(f"throughput per {each}", found.tokens_per_s / goal.cluster.gpus, "tokens/s"),
        rate("MFU", 100 * found.mfu, "%", f"; {peak}; {_FLOPS}"),
        rate("HFU", 100 * found.hfu, "%", "; counts recomputation, too"),
    ]
    if found.memory is not None:
        note = _memory_words(found.memory, goal)
        result.append(Row(f"memory per {each}", found.memory.total / GIB, "GiB", "lower", note=note))
        if found.memory.host:
            note = f"per {each}, for offloaded states; not checked against a limit"
            result.append(Row("host memory", found.memory.host / GIB, "GiB", "lower", note=note))
    reads = f"each node reads {quantity(stalls.read_bytes_per_s / 1e6, 'MB/s')}"
    saved = f"{quantity(stalls.checkpoint_bytes / 1e9, 'GB')} every {quantity(stalls.interval_s, 's')}"
    stops = f"stops training for {quantity(stalls.stop_s, 's')}, written in {quantity(stalls.write_s, 's')}"
    result += [
        Row("data loading stall", stalls.data_s, "s/step", "lower", note=reads),
        Row("checkpoint stall", stalls.checkpoint_s, "s/step", "lower", note=f"{saved}; {stops}"),
    ]
    if cost is not None:
        tokens = f"{quantity(cost.tokens, 'tokens')}, without failures; {quantity(cost.stalled_days, 'days')} of it"
        price = f"{quantity(goal.cluster.device.price_per_hour, 'USD')} per {each} hour"
        for name, value, unit, note in (
            ("run time", cost.days, "days", f"{tokens} stalled"),
            ("energy", cost.energy_mwh, "MWh", "nodes at full load; cooling is not included"),
            ("price", cost.money, "USD", price),
        ):
            told = f"{_range(value, cost.low, cost.high, unit)}; {note}"
            result.append(Row(name, value, unit, "lower", note=told))
    return result


def in_short(best: Plan, goal: TrainGoal, cost: RunCost | None, gains: Sequence[Change]) -> dict[str, str]:
    """The answer in five lines: what to use, how fast, at what price, how sure that is, and what limits it."""
    found = best.estimate
    speed = f"{quantity(found.step_s, 's')} per step, {quantity(found.tokens_per_s, 'tokens/s')}"
    price = f"{quantity(goal.cluster.price_per_hour, 'USD')} per hour; --tokens adds that of a run"
    if cost is not None:
        days = between(cost.days * cost.low, cost.days * cost.high, "days")
        speed = f"{quantity(cost.days, 'days')} ({days}) for {quantity(cost.tokens, 'tokens')}; {speed}"
        ends = " to ".join(quantity(cost.money * end, "USD") for end in (cost.low, cost.high))
        price = f"{quantity(cost.money, 'USD')} ({ends}), without failures"
    sure = f"step time {between(found.interval.low, found.interval.high, 's')} in 9 of 10 cases"
    if found.memory is not None:
        sure += f"; fits into memory with {_fits(found.memory, goal):.0%} probability"
    beyond = next((one for one in found.evidence if one.startswith(("outside", "no published"))), "")
    limit = next(iter(bounds_of(best)), "no single part of the step")
    helps = [change for change in gains if change.gain >= 0.005][:1]
    return {
        "use": f"{best.job.layout}, micro-batches of {_sequences(best.job.micro_batch)}",
        "speed": speed,
        "price": price,
        "how sure": sure + (f"; {beyond}" if beyond else ""),
        "limit": "; ".join((limit, *(f"{one.what}: {one.gain:.1%} less time" for one in helps))),
    }


def _fits(memory: MemoryLedger, goal: TrainGoal) -> float:
    return min(0.99, max(0.01, memory.fits_with_probability(goal.memory_limit_bytes)))


def _memory_words(memory: MemoryLedger, goal: TrainGoal) -> str:
    left = goal.memory_limit_bytes - memory.total
    free = f"{left / GIB:.3g} GiB free" if left >= 0 else f"{-left / GIB:.3g} GiB too much"
    ends = " to ".join(f"{end / GIB:.3g} GiB" for end in memory.interval)
    found = f"90% interval: {ends}; {free}; fits with {_fits(memory, goal):.0%} probability"
    if goal.cluster.device.generation == "cpu":
        return found
    return (
        f"{found}; as nvidia-smi shows it: the allocator reserves {memory.reserved / GIB:.3g} GiB, and "
        f"{memory.peak / GIB:.3g} GiB are allocated"
    )


def _each(goal: TrainGoal) -> str:
    """What a rank runs on, in a word."""
    return "CPU" if goal.cluster.device.generation == "cpu" else "GPU"


def _range(value: float, low: float, high: float, unit: str) -> str:
    """The interval of a step's time, carried on to what a whole run takes."""
    ends = (quantity(value * factor, unit) for factor in (low, high))
    return "90% interval: " + " to ".join(ends)


def as_dict(result: SearchResult, gains: Sequence[Change], stalls: Stalls) -> dict[str, Any]:
    """The rest of the JSON report."""
    return {
        "plans": [_plan(plan) for plan in result.plans],
        "stalls": asdict(stalls),
        "space": {"plans": result.enumerated, "too_large": result.too_large, "timed": result.timed},
        "changes": [asdict(change) for change in gains],
    }


def _plan(plan: Plan) -> dict[str, Any]:
    job, found, memory = plan.job, plan.estimate, plan.estimate.memory
    return {
        **{name: getattr(job, name) for name in ("micro_batch", "micro_batches", "recompute")},
        **{name: getattr(found, name) for name in ("step_s", "tokens_per_s", "mfu", "hfu")},
        "layout": plain(job.layout),
        "interval_s": [found.interval.low, found.interval.high],
        "breakdown_s": dict(found.breakdown),
        "memory_bytes": {line.name: line.predicted for line in memory.lines} if memory else None,
        "host_bytes": memory.host if memory else 0,
        "bytes_sent": dict(found.link_bytes),
        "evidence": list(found.evidence),
    }


def shown(
    model: str,
    goal: TrainGoal,
    result: SearchResult,
    gains: Sequence[Change],
    found: Sequence[Row],
    stalls: Stalls,
    short: Mapping[str, str],
) -> Iterator[RenderableType]:
    """The report in a terminal; `found`: the rows of the best plan; `short`: what `in_short` says."""
    best = result.plans[0]
    job, each = best.job, _each(goal)
    words = f"{job.global_batch:,} sequences of {job.sequence_length:,} tokens"
    yield marked("[bold]{}[/bold] on {}: {}", model, goal.cluster, words)
    yield grid(("", ""), short.items(), left=(0, 1))
    yield Text("Details", "bold")
    recomputed = _RECOMPUTE.get(job.recompute, f"{job.recompute} recomputed")
    words = f"{_sequences(job.micro_batch)} ({job.micro_batches:,} per step), {recomputed}"
    yield marked("[bold green]{}[/bold green], micro-batches of {}", job.layout, words)
    yield table("", found)
    yield _shares("Step time by part", (*best.estimate.breakdown, *stalls.rows()), "s")
    if best.estimate.memory is not None:
        lines = [(line.name, line.predicted / GIB) for line in best.estimate.memory.lines]
        yield _shares(f"Memory per {each}", lines, "GiB")
    if best.estimate.link_bytes:
        sent = [(_LINKS.get(name, name), size / GIB) for name, size in best.estimate.link_bytes]
        yield _shares(f"Network traffic per {each} and step", sent, "GiB")
    if len(result.plans) > 1:
        yield _ranking(result)
    yield from _why(best, result, gains)


_RECOMPUTE = {
    "none": "no recomputation",
    "selective": "attention scores recomputed",
    "full": "full recomputation",
}


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


def _shares(title: str, parts: Sequence[tuple[str, float]], unit: str) -> Table:
    whole = sum(size for _, size in parts) or 1.0
    shown = sorted(((part, size) for part, size in parts if size), key=lambda entry: -entry[1])
    figures, shared_unit = column([size for _, size in shown], unit)
    lines = [
        (part, figure, shared_unit, Text(percent(size / whole), "dim"))
        for (part, size), figure in zip(shown, figures, strict=True)
    ]
    return grid([""] * 4, lines, title, left=(0, 2))


def _ranking(result: SearchResult) -> ReportTable:
    headings = ["layout", "micro-batch", "recompute", "step time", "MFU", "memory"]
    best = result.plans[0]
    times, unit = column([plan.estimate.step_s for plan in result.plans], "s")
    rows = [
        (
            [
                str(plan.job.layout),
                _sequences(plan.job.micro_batch),
                plan.job.recompute,
                f"{time} {unit}",
                percent(plan.estimate.mfu),
                quantity(plan.estimate.memory.total / GIB, "GiB") if plan.estimate.memory else "",
            ],
            "" if plan is best else loses_by(best, plan),
        )
        for plan, time in zip(result.plans, times, strict=True)
    ]
    return ReportTable("Best plan of each mesh", headings, [place > 0 for place in range(6)], rows)


def _why(best: Plan, result: SearchResult, gains: Sequence[Change]) -> Iterator[RenderableType]:
    yield Text("Why", "bold")
    yield f"limited by {'; '.join(bounds_of(best))}"
    for change in gains[:_MOST_CHANGES]:
        if change.gain >= 0.005:
            yield f"{change.what}: {change.gain:.1%} less time"
    yield from (
        f"{each.what}: {-each.gain:.1%} more time"
        for each in gains
        if each.what == HALF_NETWORK and each.gain <= -0.005
    )
    if gains and max(change.gain for change in gains) < 0.005:
        yield "no single change of network, links, memory, batch or layout would save half a percent"
    yield from map(dim, best.estimate.evidence)
    if result.enumerated > 1:  # otherwise it was given whole
        yield dim(
            f"the space contains {result.enumerated:,} plans; {result.too_large:,} of those examined do not fit "
            f"into memory; {result.timed:,} were timed by simulating their pipeline schedule"
        )


_PASSES = {
    "forward": "Communication of a forward pass",
    "backward": "Communication of a backward pass",
    "step": "Communication once per step",
}


def phase_tables(phases: Sequence[CommunicationPhase]) -> list[Table]:
    """One for each pass, narrow enough for 80 columns."""
    return [
        _phase_table(title, some)
        for when, title in _PASSES.items()
        if (some := [phase for phase in phases if phase.when == when])
    ]


def _phase_table(title: str, phases: Sequence[CommunicationPhase]) -> Table:
    sizes, size_unit = column([phase.size_bytes / MIB for phase in phases], "MiB")
    # Both in one unit: whether compute hides a call is read off by comparing them.
    seconds, time_unit = column([each for phase in phases for each in (phase.call_s, phase.compute_s)], "s")
    lines = [
        (
            phase.where, f"{phase.axis} {phase.collective.replace('_', '-')}", f"{phase.ranks:,}",
            f"{sizes[number]} {size_unit}", f"{seconds[2 * number]} {time_unit}",
            f"{seconds[2 * number + 1]} {time_unit}", f"{phase.calls:,}", phase.bound,
        )
        for number, phase in enumerate(phases)
    ]  # fmt: skip
    headings = ("block", "collective", "ranks", "buffer", "1 call", "compute", "calls", "bound by")
    return grid(headings, lines, title, left=(0, 1, 7))


_PHASE_NAMES = {"when": "pass", "where": "block", "size_bytes": "buffer_bytes"}  # in the JSON report


def phases_as_dicts(phases: Sequence[CommunicationPhase]) -> list[dict[str, Any]]:
    return [
        {_PHASE_NAMES.get(name, name): value for name, value in asdict(phase).items()}
        | {"sent_bytes": phase.sent_bytes, "bound": phase.bound}
        for phase in phases
    ]
