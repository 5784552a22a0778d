"""`cumulo plan validate`: the planner's predictions against published training results."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from cumulo.base import report
from cumulo.base.figures import RunFigure, figure_rows, figure_table
from cumulo.base.files import write_text_file
from cumulo.base.quantiles import quantile
from cumulo.base.report import Row
from cumulo.cli.shared.declare import argument, flag, option, takes_options
from cumulo.cli.shared.terminal import err, marked, only_json, out
from cumulo.errors import ConfigError
from cumulo.plan.evidence.published import PublishedRow, citations, dates, held_out_rows, read_rows, rows
from cumulo.plan.evidence.serving import (
    ServedPrediction,
    ServedRow,
    own_runs,
    predict_served,
    served_rows,
    served_rows_of,
    wide_rows,
)
from cumulo.plan.evidence.validate import (
    COVERAGE_BAR,
    MEDIAN_BAR,
    P90_BAR,
    WIDTH_BAR,
    ErrorSummary,
    RowPrediction,
    by_source,
    predict,
    predict_left_out,
    predict_unnamed,
    scatter_svg,
)
from cumulo.plan.job import TrainJob
from cumulo.plan.search.fixed import fitted, fixed_job, said_in
from cumulo.plan.search.space import TrainGoal
from cumulo.plan.search.unnamed import likely_jobs

EXAMPLE = "Try: [bold]cumulo plan validate --left-out --worst 5[/bold]"


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    what: str = argument("Which published results to predict: training or serving.", "training", "WHICH")
    tables: Path | None = option(
        "A CSV file, or a folder of them, with results to predict instead of the built-in ones, in the "
        "columns of cumulo/plan/data/published_training.csv (serving: published_serving.csv).",
        None,
    )
    left_out: bool = flag(
        "Predict each row as if its generation of software had published nothing: with constants fitted "
        "without it, and with intervals for which only the others vouch."
    )
    held_out: bool = flag(
        "Predict the built-in rows that no constant was ever fitted to: Llama 3, DeepSeek-V3, MT-NLG, "
        "MegaScale and InternLM."
    )
    as_user: bool = flag(
        "Ask for each row with what a user of `cumulo plan train` knows: model, GPUs, layout, "
        "batch, sequence, number format and the name of the software."
    )
    unnamed: bool = flag(
        "With --as-user: name the month in which the row was published instead of the software."
    )
    undated: bool = flag("With --unnamed: do not name the month either.")
    worst: int = option("Also print this many rows with the largest errors.", 0, min=0)
    svg: Path | None = option(
        "Write a chart of predicted over published step times to this file (SVG).", None
    )
    json: Path | None = option("Write the report to this file as JSON; '-': stdout.", None)
    sources: bool = flag("Print the sources of the published results.")


@takes_options
def validate(chosen: ValidateOptions) -> None:
    """Compare the planner's predictions with published training results, by source, or with serving throughputs.

    Errors are errors of step time: +5% means that the predicted step is 5% too long (of serving: that 5% too
    many tokens per second are predicted). The figures that matter are those of --left-out: there the target is a
    median error of 8% and a 90th percentile of 18%, with 85 to 95% of the rows inside 90% intervals whose width
    (high end over low end) is at most 1.6 in the median.
    """
    from rich.progress import track

    console = err if only_json(chosen.json) else out
    if chosen.what not in ("training", "serving"):
        raise ConfigError(f"cumulo plan validate takes training or serving, got {chosen.what!r}")
    if chosen.what == "serving":
        validate_serving(console, chosen.left_out, chosen.worst, chosen.json, chosen.tables)
        return
    if chosen.held_out and (chosen.left_out or chosen.tables is not None):
        raise ConfigError(
            "--held-out has rows of its own, which nothing was fitted to; omit --left-out and --tables"
        )
    if chosen.undated and not chosen.unnamed:
        raise ConfigError("--undated goes with --unnamed: a row whose software is named needs no date")
    rows = _rows(chosen, console)
    known = dates() if chosen.unnamed and not chosen.undated else {}
    predictions = [
        _predicted(row, chosen, known) for row in track(rows, "predicting", console=console, transient=True)
    ]
    summaries = by_source(predictions)
    how = "never fitted" if chosen.held_out else "their software left out" if chosen.left_out else "as fitted"
    named = [(one.name, one) for one in summaries]
    sign = "worst and bias: + is predicted too slow, - too fast"
    console.print(figure_table("source", named, _FIGURES, f"Published step times, {how} ({sign})"))
    for prediction in sorted(predictions, key=lambda each: -abs(each.error))[: chosen.worst]:
        console.print(
            f"{prediction.error:+7.1%}  {prediction.row.name}: published {prediction.row.step_s:.3g} s, "
            f"predicted {prediction.predicted_s:.3g} s"
        )
    if chosen.sources:
        for name in dict.fromkeys(row.source for row in rows):
            console.print(marked("[bold]{}[/bold]: {}", name, citations().get(name, "no citation")))
    if chosen.svg is not None:
        write_text_file(chosen.svg, scatter_svg(predictions))
        console.print(f"chart written to {chosen.svg}")
    report.write_json(chosen.json, _report(summaries, chosen.left_out))


def _rows(chosen: ValidateOptions, console: Console) -> list[PublishedRow]:
    if chosen.tables is None:
        return list(held_out_rows() if chosen.held_out else rows())
    refused: list[str] = []
    found = read_rows(chosen.tables, refused)
    for reason in refused:
        console.print(f"left out: {reason}")
    if not found:
        raise ConfigError(
            f"{chosen.tables} contains no rows that can be predicted; the columns are those of "
            "cumulo/plan/data/published_training.csv"
        )
    return found


def _predicted(row: PublishedRow, chosen: ValidateOptions, known: Mapping[str, str]) -> RowPrediction:
    """`known`: when the software of each source was released."""
    if chosen.unnamed:
        jobs = likely(row, chosen.left_out, known.get(row.source))
        return predict_unnamed(row, jobs, chosen.left_out)
    asked = as_asked(row) if chosen.as_user else row
    return predict_left_out(asked, row.job.software) if chosen.left_out else predict(asked)


_FIGURES = (
    RunFigure("", lambda one: one.rows, heading="rows", shown="{}"),
    RunFigure("median error", lambda one: one.median, "share", "lower", "median", "{:.1%}"),
    RunFigure("90th percentile", lambda one: one.p90, "share", "lower", "p90", "{:.1%}"),
    RunFigure("", lambda one: one.worst, heading="worst", shown="{:+.0%}"),
    RunFigure("", lambda one: one.bias, heading="bias", shown="{:+.1%}"),
    RunFigure("rows in the 90% interval", lambda one: one.coverage, "share", "higher", "inside", "{:.0%}"),
    RunFigure("interval, high over low", lambda one: one.width, "times", "lower", "width", "{:.2f} ×"),
)
_BARS = (MEDIAN_BAR, P90_BAR, COVERAGE_BAR[0], WIDTH_BAR)  # of the rows, in their order


def _report(summaries: list[ErrorSummary], left_out: bool) -> list[Row]:
    found: list[Row] = []
    for summary in summaries:
        rows = figure_rows(summary.name, summary, _FIGURES)
        if left_out and summary.name == "all":
            rows = [replace(row, must=bar) for row, bar in zip(rows, _BARS, strict=True)]
            rows[2] = replace(rows[2], note=f"between {COVERAGE_BAR[0]} and {COVERAGE_BAR[1]}")
        told = {name: getattr(summary, name) for name in ("rows", "worst", "worst_row", "bias")}
        found += [replace(rows[0], more=told), *rows[1:]]
    return found


_SERVED = (
    RunFigure("", len, heading="rows", shown="{}"),
    RunFigure("median error", lambda some: _size(some, 0.5), "share", "lower", "median", "{:.1%}"),
    RunFigure("90th percentile", lambda some: _size(some, 0.9), "share", "lower", "p90", "{:.1%}"),
    RunFigure(
        "", lambda some: quantile(sorted(one.error for one in some), 0.5), heading="bias", shown="{:+.1%}"
    ),
    RunFigure(
        "rows in the 90% interval",
        lambda some: sum(one.covered for one in some) / len(some),
        "share", "higher", "inside", "{:.0%}",
    ),
    RunFigure(
        "interval, high over low",
        lambda some: quantile(sorted((1 + one.range) ** 2 for one in some), 0.5),
        "times", "lower", "width", "{:.2f} ×",
    ),
)  # fmt: skip
_SERVED_BARS = (0.12, 0.30, COVERAGE_BAR[0], None)  # of rows whose model, device or source was left out


def _size(some: Sequence[ServedPrediction], share: float) -> float:
    return quantile(sorted(abs(one.error) for one in some), share)


def validate_serving(
    console: Console, left_out: bool, worst: int, json: Path | None, tables: Path | None = None
) -> None:
    """Print the errors by model, device and source; `left_out`: each under constants that never saw it, and
    intervals for which only the others vouch."""
    rows = served_rows() if tables is None else _read(tables)
    how = "each group left out" if left_out else "as fitted"
    title = f"Published throughputs, {how} (bias: + is predicted too fast, - too slow)"
    groups: dict[str, list[ServedPrediction]] = {}
    largest: set[tuple[float, str]] = set()
    for key in ("model", "device", "source"):
        everything = []
        for row in rows:
            one = predict_served(row, key if left_out else "")
            groups.setdefault(str(getattr(row, key)) or "tables", []).append(one)
            everything.append(one)
            largest.add((one.error, row.described))
        groups[f"all, by {key}"] = everything
        pairs = zip(rows, everything, strict=True)
        groups[f"mixtures, by {key}"] = [one for row, one in pairs if row.kind == "mixture"]
    if tables is None:
        groups["DeepSeek-V3 over many GPUs, nothing fitted"] = [predict_served(row) for row in wide_rows()]
        for run in own_runs():
            name = f"Cumulo on an H200, {'fitted' if run.fitted else 'held out'}"
            groups.setdefault(name, []).append(run.prediction)
            largest.add((run.prediction.error, run.name))
    groups = {name: some for name, some in groups.items() if some}
    found: list[Row] = []
    for name, some in groups.items():
        bars = _SERVED_BARS if left_out and name.startswith("all") else (None,) * 4
        figures = figure_rows(name, some, _SERVED)
        found += [replace(row, must=bar) for row, bar in zip(figures, bars, strict=True)]
    console.print(figure_table("", groups.items(), _SERVED, title))
    for error, name in sorted(largest, key=lambda each: -abs(each[0]))[:worst]:
        console.print(f"{error:+7.0%}  {name}")
    report.write_json(json, found)


def _read(tables: Path) -> tuple[ServedRow, ...]:
    """A CSV file, or a folder of them, with the columns of cumulo/plan/data/published_serving.csv."""
    files = sorted(tables.glob("*.csv")) if tables.is_dir() else [tables]
    found: list[ServedRow] = []
    for file in files:
        try:
            with file.open(encoding="utf-8", newline="") as lines:
                found += served_rows_of(csv.DictReader(lines))
        except (OSError, KeyError, ValueError, csv.Error) as error:
            raise ConfigError(
                f"cannot read {file}: {error}; it needs the columns model, gpu, tp, weights, input, output, "
                "requests and output_tok_s, and may have pp, dp, kv, source and running"
            ) from error
    if not found:
        raise ConfigError(f"{tables} contains no published throughputs; give a CSV file or a folder of them")
    return tuple(found)


def asked_goal(row: PublishedRow, named: bool, date: str | None = None) -> TrainGoal:
    """What a user asks for who knows model, GPUs, batch, sequence, number format, and the software or at most when
    the job ran."""
    job = row.job
    return TrainGoal(
        job.model,
        row.cluster,
        job.global_batch,
        job.sequence_length,
        dtype=job.dtype,
        software=job.software if named else "current",
        software_named=named,
        date=date,
        predict_ahead=job.predict_ahead,
    )


def as_asked(row: PublishedRow) -> PublishedRow:
    """The row with the job that a user who names its software describes."""
    goal, fixed = asked_goal(row, named=True), _layout(row)
    job = fitted(fixed_job(fixed, goal), goal.memory_limit_bytes, said_in(fixed)).job
    known = goal.known_software
    return replace(row, job=replace(job, software=goal.software if known is None else known.name))


def likely(row: PublishedRow, left_out: bool, date: str | None = None) -> list[tuple[float, TrainJob]]:
    """The jobs that a user may mean who names no software, with their probabilities; `left_out`: as if nobody had
    described jobs of the row's source."""
    jobs = likely_jobs(_layout(row), asked_goal(row, False, date), row.source if left_out else "")
    return [(one.probability, one.job) for one in jobs]


def _layout(row: PublishedRow) -> str:
    """The layout as published tables print it."""
    job, layout = row.job, row.job.layout
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": job.expert_ranks}
    parts = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    if layout.shard:
        parts.append(f"shard={layout.shard}")
    if layout.schedule not in ("1f1b", "interleaved-1f1b"):
        parts.append(f"schedule={layout.schedule}")
    if layout.chunks_per_stage:
        parts.append(f"chunks={layout.chunks_per_stage}")
    if layout.data_ranks > 1:
        parts.append(f"zero={layout.zero}")
    if job.recompute != "none":
        parts.append(f"recompute={job.recompute}")
    return ",".join([*parts, f"micro_batch={job.micro_batch}"])
