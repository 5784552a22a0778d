"""`cumulo plan validate serving`: published serving throughputs and Cumulo's own runs, predicted."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from cumulo.base import report
from cumulo.base.figures import RunFigure, figure_rows, figure_table
from cumulo.base.quantiles import quantile
from cumulo.base.report import Row
from cumulo.errors import ConfigError
from cumulo.plan.evidence.published import PublishedRow
from cumulo.plan.evidence.serving import (
    ServedRow,
    own_runs,
    saturated_tokens_per_s,
    served_rows,
    served_rows_of,
)
from cumulo.plan.job import TrainJob
from cumulo.plan.search.fixed import fitted, fixed_job, said_in
from cumulo.plan.search.space import TrainGoal
from cumulo.plan.search.unnamed import likely_jobs
from cumulo.plan.serve.profile import constants, fitted_file

_FIGURES = (
    RunFigure("", len, heading="rows", shown="{}"),
    RunFigure("median error", lambda errors: _size(errors, 0.5), "share", "lower", "median", "{:.1%}"),
    RunFigure("90th percentile", lambda errors: _size(errors, 0.9), "share", "lower", "p90", "{:.1%}"),
    RunFigure("", lambda errors: quantile(sorted(errors), 0.5), heading="bias", shown="{:+.1%}"),
)
_BARS = (0.12, 0.25)  # of rows whose model or device was left out: median and 90th percentile


def _size(errors: Sequence[float], share: float) -> float:
    return quantile(sorted(map(abs, errors)), share)


def validate_serving(
    console: Console, left_out: bool, worst: int, json: Path | None, tables: Path | None = None
) -> None:
    """Print the errors by model and by device; `left_out`: each under constants that never saw it."""
    rows = served_rows() if tables is None else _read(tables)
    title = "Published throughputs, each group left out" if left_out else "Published throughputs, as fitted"
    groups: dict[str, list[float]] = {}
    largest: set[tuple[float, str]] = set()
    for key in ("model", "device"):
        everything = []
        for row in rows:
            fold = f"{key} {getattr(row, key)}"
            known = left_out and fold in fitted_file()["left_out"]
            error = saturated_tokens_per_s(row, constants(fold if known else "")) / row.tokens_per_s - 1
            groups.setdefault(str(getattr(row, key)), []).append(error)
            everything.append(error)
            largest.add((error, row.described))
        groups[f"all, by {key}"] = everything
    for one in own_runs() if tables is None else ():
        error = one.predicted_tokens_per_s() / one.tokens_per_s - 1
        groups.setdefault(f"Cumulo on an H200, {'fitted' if one.fitted else 'held out'}", []).append(error)
        largest.add((error, one.name))
    found: list[Row] = []
    for name, errors in groups.items():
        bars = _BARS if left_out and name.startswith("all") else (None, None)
        some = figure_rows(name, errors, _FIGURES)
        found += [replace(row, must=bar) for row, bar in zip(some, bars, strict=True)]
    console.print(figure_table("", groups.items(), _FIGURES, title))
    for error, name in sorted(largest, key=lambda each: -abs(each[0]))[:worst]:
        console.print(f"{error:+7.1%}  {name}")
    report.write_json(json, found)


def _read(tables: Path) -> tuple[ServedRow, ...]:
    """A CSV file, or a folder of them, with the columns of cumulo/plan/data/published_serving.csv."""
    files = sorted(tables.glob("*.csv")) if tables.is_dir() else [tables]
    found: list[ServedRow] = []
    for file in files:
        try:
            with file.open(encoding="utf-8", newline="") as lines:
                found += served_rows_of(csv.DictReader(lines))
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(
                f"cannot read {file}: {error}; it needs the columns model, gpu, tp, weights, input, output, "
                "requests and output_tok_s"
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
    return replace(row, job=replace(job, software=_software(goal)))


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


def _software(goal: TrainGoal) -> str:
    traits = goal.known_software
    return goal.software if traits is None else traits.name
