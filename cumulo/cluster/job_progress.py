"""How far a training job is, and its speed as predicted beside as measured, read from the folder of its run."""

import csv
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import yaml

from cumulo.base.quantities import quantity

_TAIL_BYTES = 1 << 16
_SPEED_STEPS = 50  # the last ones, of which the median counts


@dataclass(frozen=True, slots=True)
class JobProgress:
    step: int = 0
    steps: int | None = None  # None: not known yet
    loss: float | None = None
    step_s: float | None = None  # measured
    predicted_step_s: float | None = None
    basis: str = ""  # what the prediction rests on

    @property
    def predicted_text(self) -> str:
        """A bound from below is marked as one."""
        if self.predicted_step_s is None:
            return "–"
        return f"{'≥ ' if 'the least' in self.basis else ''}{quantity(self.predicted_step_s, 's')}"

    @property
    def finished(self) -> bool:
        return self.steps is not None and self.step >= self.steps

    @property
    def left_s(self) -> float | None:
        """Seconds until it is done, at the measured speed or else at the predicted one."""
        speed = self.step_s or self.predicted_step_s
        return None if self.steps is None or speed is None else (self.steps - self.step) * speed


def run_progress(run_folder: Path) -> JobProgress:
    """The progress of a run that may not have begun, or may be writing at this moment."""
    steps = None
    if (config := _read(run_folder / "config.yaml")) is not None:
        content = yaml.safe_load(config)
        steps = content.get("steps") if isinstance(content, dict) else None
    predicted, basis = _prediction(run_folder)
    rows = _last_rows(run_folder / "log.csv")
    if not rows:
        return JobProgress(0, steps, predicted_step_s=predicted, basis=basis)
    times = [step_s for _, _, step_s in rows[-_SPEED_STEPS:]]
    step, loss, _ = rows[-1]
    return JobProgress(step, steps, loss, statistics.median(times), predicted, basis)


def _prediction(run_folder: Path) -> tuple[float | None, str]:
    try:
        lines = json.loads(_read(run_folder / "ledger.json") or "[]")
    except ValueError:
        return None, ""
    return next(((line["predicted"], line["basis"]) for line in lines if line["name"] == "step"), (None, ""))


def _last_rows(path: Path) -> list[tuple[int, float, float]]:
    """Step, loss and seconds of the last steps; a line that is being written does not count."""
    try:
        with path.open("rb") as stream:
            names = stream.readline().decode().strip().split(",")
            start = stream.tell()
            stream.seek(0, 2)
            end = stream.tell()
            stream.seek(max(start, end - _TAIL_BYTES))
            text = stream.read().decode()
            cut = end - _TAIL_BYTES > start
    except OSError:
        return []
    lines = text[: text.rfind("\n") + 1].splitlines()[1 if cut else 0 :]
    found = []
    for row in csv.DictReader(lines, fieldnames=names):
        try:
            found.append((int(row["step"]), float(row["loss"]), float(row["step_s"])))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except OSError:
        return None
