"""`cumulo schedule`: the timeline of a pipeline schedule, and its bubble next to the published formula."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from cumulo.base import report
from cumulo.base.report import Row
from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import dim, marked, out, present, save

if TYPE_CHECKING:
    from cumulo.pipeline.decide.catalog import Family
    from cumulo.pipeline.decide.costs import Costs
    from cumulo.pipeline.simulate.timeline import Timeline

EXAMPLE = "Example: [bold]cumulo schedule zb-v --stages 4 --micro-batches 8 --svg zb-v.svg[/bold]"
_NAMES = "Schedule: gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v, dualpipe or dualpipe-v."


def schedule(
    name: str = typer.Argument(..., metavar="NAME", help=_NAMES),
    stages: int = typer.Option(4, help="Number of pipeline stages."),
    micro_batches: int = typer.Option(8, help="Micro-batches per step."),
    chunks: int | None = typer.Option(None, help="Model chunks per stage, for interleaved-1f1b."),
    forward_ms: float = typer.Option(1, help="Forward time of a micro-batch on one stage, in ms."),
    backward_input_ms: float = typer.Option(
        1, help="Time of the input-gradient half of the backward pass, in ms."
    ),
    backward_weight_ms: float = typer.Option(
        1, help="Time of the weight-gradient half of the backward pass, in ms."
    ),
    overlap_saving: float = typer.Option(
        0, help="Share of forward and backward time saved where DualPipe overlaps them, from 0 to 1."
    ),
    latency_us: float = typer.Option(0, help="Latency of a message between stages, in µs."),
    message_mib: float = typer.Option(0, help="Size of a micro-batch's activation or gradient, in MiB."),
    bandwidth_gb_s: float | None = typer.Option(
        None, help="Bandwidth between two stages in each direction, in GB/s. Default: no limit."
    ),
    svg: Path | None = typer.Option(None, help="Also draw the timeline into this file (SVG)."),
    perfetto: Path | None = typer.Option(None, help="Also write a Chrome/Perfetto trace to this file."),
    json_file: options.JsonOption = None,
) -> None:
    """Draw the timeline of a pipeline schedule, with its bubble and memory next to the published formula."""

    from cumulo.pipeline.decide.catalog import build, family
    from cumulo.pipeline.decide.check import check
    from cumulo.pipeline.decide.costs import Costs, Link
    from cumulo.pipeline.draw import to_perfetto, to_svg
    from cumulo.pipeline.simulate.timeline import simulate

    chosen = family(name)
    built = build(name, stages, micro_batches, chunks)
    checked = check(built)
    costs = replace(
        Costs.of_stage(built, forward_ms / 1e3, backward_input_ms / 1e3, backward_weight_ms / 1e3),
        overlap_saving=overlap_saving,
        link=Link(latency_us / 1e6, float("inf") if bandwidth_gb_s is None else bandwidth_gb_s * 1e9),
        message_bytes=message_mib * 2**20,
    )
    timeline = simulate(built, costs)
    title = f"{chosen.name}: {stages} stages, {micro_batches} micro-batches"
    save(svg, lambda: to_svg(timeline, title), "chart")
    save(perfetto, lambda: to_perfetto(timeline), "trace for https://ui.perfetto.dev")
    rows = _rows(chosen, timeline, costs, max(checked.peak_live_activations))
    heading = marked("[bold]{}[/bold]  [dim]{} ({})[/dim]", title, chosen.title, chosen.paper)
    present(rows, json_file, heading, *_picture(timeline), report.table("", rows))


def _rows(chosen: "Family", timeline: "Timeline", costs: "Costs", peak: int) -> "list[Row]":
    schedule, formula = timeline.schedule, chosen.formula
    stages, micro_batches = schedule.stages, schedule.micro_batches
    idle_s = max(timeline.inner_bubble_s if formula.inner else timeline.bubble_s)
    where = "from a stage's first action to its last" if formula.inner else "over the whole step"
    rows = [
        Row("step time", timeline.makespan_s * 1e3, "ms", "lower"),
        Row("bubble", timeline.bubble_ratio * 100, "%", "lower", note="idle share of the time of all stages"),
        Row("bubble of the worst stage", idle_s * 1e3, "ms", "lower", note=where),
    ]
    if formula.applies(stages, micro_batches, costs):
        published_s = formula.bubble_s(stages, costs)
        rows.append(Row("published bubble", published_s * 1e3, "ms", "lower", note=formula.text))
    else:
        least = formula.least_micro_batches(stages)
        needs = f"applies to {formula.condition}, {least} or more micro-batches, free communication"
        rows.append(Row("published bubble", None, "ms", "lower", note=f"{formula.text} {needs}"))
    published_peak = formula.peak(stages, micro_batches, schedule.chunks_per_stage)
    size = f"of 1/{schedule.chunks} of the model" if schedule.chunks > 1 else "of the model"
    rows += [
        Row("peak live activations", peak, "", "lower", note=f"micro-batches {size}, on the fullest stage"),
        Row("published peak", published_peak, "", "lower", note=formula.peak_text),
    ]
    return rows


def _picture(timeline: "Timeline") -> Iterator[Text]:
    """A line for each stage, then what the letters mean."""
    from cumulo.pipeline.decide.actions import Kind
    from cumulo.pipeline.draw import columns_to_read, text_rows

    # Background for each kind; the second colour is for a later chunk or the reverse direction.
    styles = {
        Kind.FORWARD: ("black on bright_blue", "black on blue"),
        Kind.BACKWARD: ("black on bright_green", "black on green"),
        Kind.BACKWARD_INPUT: ("black on bright_yellow", "black on yellow"),
        Kind.BACKWARD_WEIGHT: ("black on bright_magenta", "black on magenta"),
    }
    margin = len(str(timeline.schedule.stages - 1)) + 1
    wanted, room = columns_to_read(timeline), max(20, out.width - margin)
    for stage, row in enumerate(text_rows(timeline, min(wanted, room))):
        line = Text(no_wrap=True).append(str(stage).rjust(margin - 1) + " ", "dim")
        for cell in row:
            line.append(cell.text, styles[cell.kind][cell.second] if cell.kind else "on default")
        yield line
    yield dim(
        "F forward · B backward · I input-gradient half of backward · W weight-gradient half of backward"
    )
    if wanted > room:
        needed = f"{wanted + margin} columns are needed to show every micro-batch's number"
        yield dim(f"{needed}; --svg FILE draws them, too")
