"""What `cumulo train` does once its options are read: the configuration, the run, its display and its report."""

import math
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID

from cumulo.base.quantities import percent, quantity
from cumulo.base.report import Row, table, write_json
from cumulo.checkpoint.play.lease import take_lease
from cumulo.cli.shared.terminal import err, loading, note, only_json, out, show_report, text_column
from cumulo.errors import ConfigError, CumuloError, TrainingError
from cumulo.ranks.launch import (
    LOST,
    REFUSED,
    check_machine,
    end_with_starter,
    launch,
    report_refusal,
    under_torchrun,
)
from cumulo.train.decide.config import TrainConfig, config_text, known_spec
from cumulo.train.head.config import HeadConfig
from cumulo.train.run.log import TrainRecord, note_start

if TYPE_CHECKING:
    from cumulo.base.quantities import LedgerLine
    from cumulo.train.run.trainer import Trainer, TrainResult


def parse_change(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ConfigError(f"--set takes NAME=VALUE, such as optimizer.learning_rate=1e-3; got {text!r}")
    return name.strip(), value


def print_config(config: TrainConfig) -> None:
    out.print(config_text(config), soft_wrap=True, end="")


def print_settings() -> None:
    from cumulo.train.decide.settings import settings_text

    out.print(settings_text(), soft_wrap=True, end="")


def print_layout(config: TrainConfig) -> None:
    from cumulo.train.decide.layout_report import explain_layout

    out.print(explain_layout(config, known_spec(config)), soft_wrap=True)


def print_verdict(config: TrainConfig, json_file: Path | None) -> None:
    """Train the configuration's kind of model, made small, in one process and under its layout."""
    with err.status("training in one process, and under the layout"):
        from cumulo.train.run.verify import TOLERANCE, verify_layout

        verdict = verify_layout(config)
    row = Row(
        "largest difference", verdict.difference, "relative", "lower", must=TOLERANCE,
        note=f"of losses, gradient norms and final weights over {verdict.steps} steps; at {verdict.where}",
    )  # fmt: skip
    show_report(
        f"{verdict.layout} in float64 against one process", [row], json_file, losses=list(verdict.losses)
    )
    if not verdict.same:
        raise TrainingError(f"layout {verdict.layout} does not compute the same result as one process")


def run(config: TrainConfig, resume: bool, json_file: Path | None, take_over: bool = False) -> None:
    """Train in this process, as one rank of several, or by starting the ranks."""
    if under_torchrun():
        end_with_starter()
        _run_rank(config, resume, json_file)
        return
    if take_over:
        take_lease(Path(config.folder), note, by_force=True).release()
    if config.layout.world > 1:
        _launch(config, resume, json_file)
        return
    with err.status("starting"):
        from cumulo.train.run.trainer import Trainer
    display = Display(config)
    with display.bar:
        result = Trainer(config, resume=resume, watcher=display).run()
    _report(config, result, json_file)


def _launch(config: TrainConfig, resume: bool, json_file: Path | None) -> None:
    """Prepare what can be, once and where errors are seen, then start the ranks on what is in the folder."""
    with err.status("starting"):
        from cumulo.train.data.prepare import prepare
        from cumulo.train.run.trainer import refuse_to_overwrite
    check_machine(config.layout, config.device)
    if not resume:
        refuse_to_overwrite(Path(config.folder))
    display = Display(config)
    lease = take_lease(Path(config.folder), note)  # until rank 0 takes it
    try:
        with display.bar:
            prepare(config, display.preparing)
        (Path(config.folder) / "config.yaml").write_text(config_text(config), "utf-8")
    finally:
        lease.release()
    note(f"{config.layout.world} processes: {config.layout}")
    command = [sys.executable, "-m", "cumulo", "train", "--folder", config.folder, "--resume"]
    if json_file is not None:
        command += ["--json", str(json_file)]

    def tell(why: str) -> None:
        note(why)
        note_start(Path(config.folder), why=why)

    plot = Path(config.folder) / "loss.svg"  # the last thing that a run writes
    before = plot.exists() and plot.stat().st_mtime_ns
    ended = launch(command, config.layout.world, config.faults.most_restarts, tell)
    if not ended and before == (plot.exists() and plot.stat().st_mtime_ns):
        note("stopped before the ranks had begun: nothing was trained")
        raise typer.Exit(130)


def _run_rank(config: TrainConfig, resume: bool, json_file: Path | None) -> None:
    from cumulo.ranks.start import lost_another
    from cumulo.train.run.worker import run_worker

    first = os.environ["RANK"] == "0"
    display = Display(config) if first else None
    try:
        with display.bar if display is not None else nullcontext():
            result = run_worker(config, resume, display)
    except CumuloError as error:
        report_refusal(error)
        _end(REFUSED)
    except RuntimeError as error:
        if not lost_another(error):
            raise
        note(
            f"rank {os.environ['RANK']} lost the connection to another rank: {str(error).splitlines()[0][:120]}"
        )
        _end(LOST)
    if first and result is not None:
        _report(config, result, json_file)


def _end(code: int) -> NoReturn:
    """End at once: threads that still wait for ranks that are gone are not waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(config: TrainConfig, result: "TrainResult", json_file: Path | None) -> None:
    rows = report_rows(result)
    if not only_json(json_file):
        done = "finished" if result.finished else f"stopped after step {result.steps}; checkpoint saved"
        out.print(table(f"{config.folder}: {done}", rows))
        out.print(f"\nlog {config.folder}/log.csv · plot {result.plot}", soft_wrap=True)
        if not result.finished:
            out.print(f"resume: cumulo train --resume --folder {config.folder}", soft_wrap=True)
        out.print(f"chat: cumulo chat {result.model_folder}", soft_wrap=True)
        if result.adapter_folder is not None:
            words = f"adapter in PEFT layout: {result.adapter_folder}"
            out.print(words, soft_wrap=True)
    write_json(json_file, rows, losses=[record.loss for record in result.records])


_MFU_COUNTS = "3 × forward (2 × for frozen weights), causal attention once, recomputation not counted"


def report_rows(result: "TrainResult") -> list[Row]:
    records = result.records
    if not records:
        return []
    tokens_s = sorted(record.tokens_per_s for record in records)[len(records) // 2]
    known = sorted(record.mfu for record in records if not math.isnan(record.mfu))
    mfu = 100 * known[len(known) // 2] if 2 * len(known) > len(records) else None
    rows = [
        Row("first loss", records[0].loss, "nats/token", "lower"),
        Row("last loss", records[-1].loss, "nats/token", "lower"),
        Row("held-out loss", result.held_out_loss, "nats/token", "lower", note="not trained on"),
        Row("tokens", records[-1].tokens, "trained"),
        Row("time", result.seconds, "s", "lower", note="of this run, without preparation"),
        Row("throughput", tokens_s, "tokens/s", note="of the median step"),
        Row("MFU", mfu, "%", note=_MFU_COUNTS),
        Row("waiting for data", result.data_stall_s, "s", "lower"),
        Row("waiting for checkpoints", result.checkpoint_block_s, "s", "lower"),
        Row("peak memory", result.peak_memory_bytes / 2**30, "GiB", "lower"),
    ]
    measured = [ledger_row(entry) for entry in result.ledger if entry.measured is not None]
    return [row for row in rows if row.value is not None] + measured


def ledger_row(entry: "LedgerLine") -> Row:
    """What was measured, with what had been predicted."""
    scale, unit = (2**20, "MiB") if entry.unit == "bytes" else (1, entry.unit)
    measured = (entry.measured or 0.0) / scale
    words = f"predicted {quantity(entry.predicted / scale, unit)} ({entry.how})"
    return Row(entry.name, measured, unit, "lower", note=words, more={"predicted": entry.predicted / scale})


class Display:
    """A progress bar in a terminal; elsewhere, about 20 lines per run."""

    def __init__(self, config: TrainConfig) -> None:
        self.steps = config.steps
        self._every = max(1, config.steps // 20)
        self._mean: float | None = None
        self.bar = Progress(
            text_column("{task.description}", "bold"), BarColumn(bar_width=24), MofNCompleteColumn(),
            text_column("{task.fields[words]}", "dim"),
            console=err, disable=not err.is_terminal,
        )  # fmt: skip
        self._task: TaskID = self.bar.add_task("preparing", total=None, words="")

    def preparing(self, stage: str, done: int, total: int) -> None:
        if not err.is_terminal and done == 0:
            note(stage)
        self.bar.update(self._task, description=stage, completed=done, total=total or None)

    def begins(self, run: "Trainer", first_step: int) -> None:
        from cumulo.spec.counting import parameter_count

        ceiling = run.forecast.ceiling
        peak = f"{ceiling.flops / 1e9:,.0f}" if ceiling.flops >= 1e10 else f"{ceiling.flops / 1e9:.2g}"
        note(
            f"{parameter_count(run.spec) / 1e6:.2f} M parameters, {run.packing.tokens:,} tokens "
            f"({run.packing.samples_per_epoch:,} sequences of {run.packing.length}) in {run.dataset.documents:,} "
            f"documents; {run.device.type} {run.config.dtype}, {peak} GFLOP/s peak ("
            f"{ceiling.source})"
        )
        tokens = run.packing.length * run.config.batch_sequences
        passes = self.steps * run.config.batch_sequences / run.packing.samples_per_epoch
        read = f"them {passes:.2g} times"
        if passes < 1:
            read = f"{percent(passes)} of them; --steps {math.ceil(self.steps / passes)} reads all"
        note(f"{self.steps:,} steps of {tokens:,} tokens read {read}")
        self._began = (first_step, time.perf_counter())
        self.bar.reset(self._task, description="training", total=self.steps, completed=first_step, words="")

    def step(self, record: TrainRecord, memory_bytes: int) -> None:
        self._mean = record.loss if self._mean is None else 0.9 * self._mean + 0.1 * record.loss
        mfu = "" if math.isnan(record.mfu) else f"MFU {100 * record.mfu:.0f}% · "
        words = (
            f"loss {self._mean:.3f} · {record.tokens_per_s:,.0f} tok/s · {mfu}{memory_bytes / 2**30:.1f} GiB"
        )
        first_step, began = self._began
        if left := self.steps - record.step:
            left_s = left * (time.perf_counter() - began) / max(1, record.step - first_step)
            words += f" · {quantity(left_s, 's')} left"
        self.bar.update(self._task, completed=record.step, words=words)
        if not err.is_terminal and (record.step % self._every == 0 or record.step in (1, self.steps)):
            note(f"step {record.step}/{self.steps} · loss {record.loss:.4f} · {words.split(' · ', 1)[1]}")

    def tell(self, message: str) -> None:
        note(message)


def train_head(config: HeadConfig, json_file: Path | None) -> None:
    with err.status("starting"):
        from cumulo.train.head.trainer import HeadTrainer
    with loading() as tell:
        result = HeadTrainer(config, tell).run()
    rows = [
        Row(
            f"{name}: proposal {index}, right", share, "of 1", note="those before it being right",
        )
        for name, proposals in result.right.items()
        for index, share in enumerate(proposals, 1)
    ]  # fmt: skip
    rows += [
        Row("tokens the head can propose", result.known_share, "of 1"),
        Row("loss", result.loss, better="lower"),
        Row("trained on", result.tokens, "tokens", note=f"{result.answers} answers of the model itself"),
        Row("took", result.seconds, "s", better="lower"),
    ]
    show_report("draft head", rows, json_file)
    note(f"to use it: cumulo serve --speculate {result.folder}")
