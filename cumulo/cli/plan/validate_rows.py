"""`cumulo plan validate serving`: published serving throughputs and Cumulo's own runs, predicted."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from cumulo.base import report
from cumulo.base.quantiles import quantile
from cumulo.base.report import Row
from cumulo.cli.plan.train import parsed
from cumulo.errors import ConfigError
from cumulo.plan.evidence.published import PublishedRow, machines
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
from cumulo.spec.model_file import plain

_BARS = (0.12, 0.25)  # of rows whose model or device was left out: median and 90th percentile


def validate_serving(
    console: Console, left_out: bool, worst: int, json: Path | None, tables: Path | None = None
) -> None:
    """Print the errors by model and by device; `left_out`: each under constants that never saw it."""

    rows = served_rows() if tables is None else _read(tables)
    title = "Published throughputs, each group left out" if left_out else "Published throughputs, as fitted"
    table, found, largest = _table(title), list[report.Row](), set[tuple[float, str]]()
    for key in ("model", "device"):

        def error_of(row: ServedRow, key: str = key) -> float:
            fold = f"{key} {getattr(row, key)}"
            known = left_out and fold in fitted_file()["left_out"]
            return saturated_tokens_per_s(row, constants(fold if known else "")) / row.tokens_per_s - 1

        errors: dict[str, list[float]] = {}
        for row in rows:
            error = error_of(row)
            errors.setdefault(str(getattr(row, key)), []).append(error)
            largest.add((error, row.described))
        errors[f"all, by {key}"] = [error for some in list(errors.values()) for error in some]
        for name, some in errors.items():
            found += _summary(table, name, some, left_out and name.startswith("all"))
        table.add_section()
    if tables is None:
        for name, fitted in (("Cumulo on an H200, fitted", True), ("Cumulo on an H200, held out", False)):
            runs = [one for one in own_runs() if one.fitted == fitted]
            errors_of = {one.name: one.predicted_tokens_per_s() / one.tokens_per_s - 1 for one in runs}
            largest |= {(error, run) for run, error in errors_of.items()}
            found += _summary(table, name, list(errors_of.values()), judged=False)
    console.print(table)
    for error, name in sorted(largest, key=lambda each: -abs(each[0]))[:worst]:
        console.print(f"{error:+7.1%}  {name}")
    report.write_json(json, found)


def _table(title: str) -> Table:

    table = Table(title=title, box=None)
    table.add_column("", no_wrap=True)
    for heading in ("rows", "median", "p90", "bias"):
        table.add_column(heading, justify="right")
    return table


def _summary(table: Table, name: str, errors: Sequence[float], judged: bool) -> list[Row]:

    sizes = sorted(map(abs, errors))
    shown: Callable[[float], str] = "{:.1%}".format
    median, p90, bias = quantile(sizes, 0.5), quantile(sizes, 0.9), quantile(sorted(errors), 0.5)
    table.add_row(name, str(len(errors)), shown(median), shown(p90), f"{bias:+.1%}")
    bars = _BARS if judged else (None, None)
    return [
        Row(f"{name}: median error", median, "share", "lower", bars[0]),
        Row(f"{name}: 90th percentile", p90, "share", "lower", bars[1]),
    ]


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


class AskedRows:
    """Rows as a user's questions. Models and machines that are in no catalogue go into a file of the user's own."""

    def __init__(
        self, rows: list[PublishedRow], folder: Path, named: bool, dates: Mapping[str, str] | None = None
    ) -> None:
        self.named = named  # whether the user names the software
        self.dates = (
            dates or {}
        )  # when each source's jobs ran, which the user says where the software is not named
        self.file = folder / "published.yaml"
        tables = {kind: dict(entries) for kind, entries in machines().tables.items()}
        tables["models"] |= {row.name: plain(row.job.model) for row in rows}
        self.file.write_text(yaml.safe_dump(tables), "utf-8")

    def words(self, row: PublishedRow) -> list[str]:
        job, fabric = row.job, row.cluster.fabric.name
        words = [
            row.name, "--catalog", str(self.file), "--gpus", str(row.cluster.gpus), "--node", row.cluster.node.name,
            "--batch", str(job.global_batch), "--sequence", str(job.sequence_length), "--dtype", job.dtype,
            "--fixed", _layout(row),
        ]  # fmt: skip
        if fabric != "rail-infiniband":
            words += ["--fabric", fabric]
        if job.predict_ahead:
            words += ["--mtp", str(job.predict_ahead)]
        if self.named:
            words += ["--software", job.software]
        elif row.source in self.dates:
            words += ["--date", self.dates[row.source]]
        return words

    def asked(self, row: PublishedRow) -> PublishedRow:
        """The row with the job that the words describe."""
        goal, fixed = parsed(self.words(row))
        assert fixed is not None
        job = fitted(fixed_job(fixed, goal), goal.memory_limit_bytes, said_in(fixed)).job
        return replace(row, job=replace(job, software=_software(goal)), cluster=goal.cluster)

    def likely(self, row: PublishedRow, left_out: bool) -> list[tuple[float, TrainJob]]:
        """The jobs that the words may mean where they name no software, with their probabilities; `left_out`: as if
        nobody had described jobs of the row's source."""
        goal, fixed = parsed(self.words(row))
        assert fixed is not None
        jobs = likely_jobs(fixed, goal, row.source if left_out else "")
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
