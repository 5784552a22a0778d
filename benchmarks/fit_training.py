"""Fits the constants of `efficiency.yaml` to the published training rows, all of them together.

    python benchmarks/fit_training.py                        # prints constants and errors
    python benchmarks/fit_training.py --write                # ... and writes them into the package
    python benchmarks/fit_training.py --leave-out generation # errors of rows under constants that never saw them

A step's time is nearly linear in the constants of a profile, and the bound of its schedule wholly so: each row is
described once by the seconds that a unit of each constant takes, and described again where the fit has moved. The
constants' logarithms are then moved by damped Gauss–Newton steps (Levenberg 1944, Marquardt 1963) so that
log(predicted / published) becomes small; rows far off count less (weights of an L1 fit), rows of software that has
many count less, and each constant is drawn to its prior in `training_priors.py`.
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from training_priors import ATTENTION, ATTENTION_SPREAD, PRIORS

from cumulo.cli.plan.validate import likely
from cumulo.plan.evidence.published import PublishedRow, rows
from cumulo.plan.evidence.validate import unnamed_s
from cumulo.plan.time import efficiency
from cumulo.plan.time.compute_profile import Profile
from cumulo.plan.time.efficiency import (
    Efficiency,
    composed,
    left_out_efficiency,
    shipped_efficiency,
    with_constants,
)
from cumulo.plan.time.step import step_time

DATA = Path(efficiency.__file__).parents[1] / "data"
NOISE = 0.04  # errors below this count by their square, above by their size
BALANCE = 0.3  # a generation of n rows counts n^(1 - BALANCE)
INVERSE = (
    "matmul_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
    "data_rate",
)
WORK = (
    *INVERSE, "matmul_traffic", "elementwise_passes", "score_bytes", "logit_bytes", "weight_bytes",
    "optimizer_bytes", "launch_s", "expert_passes", "expert_bias_passes", "expert_launch_s", "chunk_launch_s",
    "step_s", "tensor_exposed", "tensor_overlapped_exposed", "context_exposed", "expert_exposed",
    "expert_overlapped_exposed", "data_exposed",
)  # fmt: skip
NAMES = [*PRIORS, *(f"{place}/{kernel}" for place, kernel in ATTENTION)]
PRIOR = np.log([*(value for value, _ in PRIORS.values()), *(1.0 for _ in ATTENTION)])
LOOSE = np.log([*(times for _, times in PRIORS.values()), *(ATTENTION_SPREAD for _ in ATTENTION)])


def generation_of(row: PublishedRow) -> str:
    return efficiency.generation_of(row.job.software)


def model_of(row: PublishedRow) -> str:
    return f"{row.job.model.layers} layers of {row.job.model.hidden}"


KEYS: dict[str, Callable[[PublishedRow], str]] = {
    "generation": generation_of,
    "source": lambda row: row.source,
    "model": model_of,
}


def with_logs(logs: np.ndarray) -> Efficiency:
    return with_constants(shipped_efficiency(), dict(zip(NAMES, np.exp(logs).tolist(), strict=True)))


def profile_of(row: PublishedRow, given: Efficiency) -> Profile:
    device = row.cluster.device
    return composed(
        given.software[row.job.software], device.generation, row.job.dtype, device=device, given=given
    )


def units(profile: Profile) -> np.ndarray:
    """The constants as a step's time is linear in them."""
    return np.array(
        [1 / getattr(profile, name) if name in INVERSE else getattr(profile, name) for name in WORK]
    )


@dataclass
class Work:
    """A row as seconds for each unit of each constant, and seconds that no constant changes."""

    seconds: np.ndarray
    rest: float


def work_of(row: PublishedRow, profile: Profile) -> Work:
    def bound(given: Profile) -> float:
        return step_time(row.job, row.cluster, given, play=False).step_s

    base, now = bound(profile), units(profile)
    played = 1.0
    if row.job.layout.pp > 1:
        played = step_time(row.job, row.cluster, profile, play=True).step_s / base
    slope = np.zeros(len(WORK))
    for index, name in enumerate(WORK):
        more = now[index] * 1.02
        shifted = replace(profile, **{name: 1 / more if name in INVERSE else more})  # type: ignore[arg-type]
        slope[index] = (bound(shifted) - base) / (more - now[index])
    return Work(slope * played, float((base - slope @ now) * played))


class Fit:
    """All rows and the search for constants; `keep` says which rows a search may see."""

    def __init__(self, some: Sequence[PublishedRow]) -> None:
        self.rows = list(some)
        self.logs_published = np.log([row.step_s for row in self.rows])
        kinds = [(row.job.software, row.cluster.device.name, row.job.dtype) for row in self.rows]
        self.first = {kind: self.rows[kinds.index(kind)] for kind in dict.fromkeys(kinds)}
        order = {kind: index for index, kind in enumerate(self.first)}
        self.kind = np.array([order[kind] for kind in kinds])
        count = Counter(map(generation_of, self.rows))
        weight = np.array([count[generation_of(row)] ** -BALANCE for row in self.rows])
        self.weight = weight * len(weight) / weight.sum()
        self.describe(PRIOR)

    def describe(self, logs: np.ndarray) -> None:
        given = with_logs(logs)
        works = [work_of(row, profile_of(row, given)) for row in self.rows]
        self.seconds = np.array([work.seconds for work in works])
        self.rest = np.array([work.rest for work in works])

    def units(self, logs: np.ndarray, given: Efficiency | None = None) -> np.ndarray:
        given = given or with_logs(logs)
        return np.array([units(profile_of(row, given)) for row in self.first.values()])

    def errors(self, logs: np.ndarray, given: Efficiency | None = None) -> np.ndarray:
        """log(predicted / published)"""
        times = np.sum(self.seconds * self.units(logs, given)[self.kind], axis=1) + self.rest
        return np.log(np.maximum(times, 1e-9)) - self.logs_published

    def slopes(self, logs: np.ndarray) -> np.ndarray:
        now = self.units(logs)
        parts = self.seconds * now[self.kind]
        shares = parts / (parts.sum(axis=1) + self.rest)[:, None]
        found = np.empty((len(self.rows), len(logs)))
        for column in range(len(logs)):
            shifted = logs.copy()
            shifted[column] += 0.01
            change = np.log(self.units(shifted) / now) / 0.01
            found[:, column] = np.sum(shares * change[self.kind], axis=1)
        return found

    def run(self, keep: np.ndarray, start: np.ndarray = PRIOR, rounds: int = 30) -> np.ndarray:
        def loss(logs: np.ndarray) -> float:
            error = self.errors(logs)[keep]
            far = np.sum(self.weight[keep] * (np.sqrt(error**2 + NOISE**2) - NOISE)) / NOISE
            return float(far + 0.5 * np.sum(((logs - PRIOR) / LOOSE) ** 2))

        logs, damping, before = start.copy(), 1e-2, loss(start)
        for _ in range(rounds):
            error, slope = self.errors(logs)[keep], self.slopes(logs)[keep]
            weight = self.weight[keep] / (NOISE * np.sqrt(error**2 + NOISE**2))
            curvature = slope.T @ (weight[:, None] * slope) + np.diag(1 / LOOSE**2)
            gradient = slope.T @ (weight * error) + (logs - PRIOR) / LOOSE**2
            gained = 0.0
            for _ in range(6):
                step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
                trial = logs - np.clip(step, -0.5, 0.5)
                after = loss(trial)
                if after < before:
                    gained, logs, before, damping = before - after, trial, after, damping / 3
                    break
                damping *= 4
            if gained < 1e-3:
                break
        return logs

    def settled(self) -> np.ndarray:
        """Constants of all rows, described again where the fit has moved."""
        logs = self.run(np.ones(len(self.rows), bool))
        for _ in range(2):
            self.describe(logs)
            logs = self.run(np.ones(len(self.rows), bool), logs)
        return logs

    def without(self, key: Callable[[PublishedRow], str], name: str) -> np.ndarray:
        """Constants of the rows that a key does not give this name."""
        return self.run(np.array([key(row) != name for row in self.rows]))


def spread(error: np.ndarray) -> str:
    off = np.abs(np.expm1(error))
    signed = np.median(np.expm1(error))
    return f"{len(off):4} rows, median {np.median(off):5.1%}, p90 {np.quantile(off, 0.9):5.1%}, bias {signed:+5.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the constants into the package")
    parser.add_argument("--leave-out", choices=list(KEYS), help="only errors of rows that were left out so")
    options = parser.parse_args()
    fit = Fit(rows())
    logs = fit.settled()
    print(f"fitted, {len(NAMES)} constants: {spread(fit.errors(logs))}")
    keys = [options.leave_out] if options.leave_out else ["generation"] if options.write else list(KEYS)
    for what in keys:
        key = KEYS[what]
        out = np.empty(len(fit.rows))
        folds = {}
        for name in dict.fromkeys(map(key, fit.rows)):
            folds[name] = fit.without(key, name)
            mine = np.array([key(row) == name for row in fit.rows])
            out[mine] = fit.errors(folds[name])[mine]
        for source in dict.fromkeys(row.source for row in fit.rows):
            mine = np.array([row.source == source for row in fit.rows])
            print(f"  {what} left out, {source:26} {spread(out[mine])}")
        print(f"{what} left out: {spread(out)}")
        if what == "generation" and options.write:
            write_folds(folds)
            write_constants(logs)
            write_errors(fit.rows, logs, folds)
    for name, log, prior in zip(NAMES, logs, PRIOR, strict=True):
        print(f"  {name:30} {math.exp(log):10.4g}  (drawn to {math.exp(prior):.4g})")


def write_constants(logs: np.ndarray) -> None:
    """Into the lines of `efficiency.yaml`, leaving comments and everything else."""
    path = DATA / "efficiency.yaml"
    text = path.read_text("utf-8")
    for name, log in zip(NAMES, logs, strict=True):
        value = f"{math.exp(log):.3g}"
        if "/" not in name:
            text = re.sub(rf"^  {name}: .*$", f"  {name}: {value}", text, flags=re.MULTILINE)
            continue
        place, kernel = name.split("/")
        start = text.index("attention_reach:")
        head, tail = text[:start], text[start:]
        line = re.compile(rf"^(  {place}: .*{kernel}: )[0-9.e-]+", re.MULTILINE)
        text = head + line.sub(rf"\g<1>{value}", tail, count=1)
    put(path, text)


def write_folds(folds: dict[str, np.ndarray]) -> None:
    """Constants that never saw a generation of software, for `cumulo plan validate --left-out`."""
    content = {
        name: {each: float(f"{math.exp(log):.3g}") for each, log in zip(NAMES, logs, strict=True)}
        for name, logs in folds.items()
    }
    head = "# Constants of efficiency.yaml, each set fitted without one generation of software: fit_training.py.\n"
    put(DATA / "efficiency_left_out.yaml", head + yaml.safe_dump(content, sort_keys=False))


def write_errors(some: Sequence[PublishedRow], logs: np.ndarray, folds: dict[str, np.ndarray]) -> None:
    """Each row's error under the constants, and under those that never saw its generation of software."""
    logs = rounded(logs)
    lines = ["id,predicted_over_published,predicted_without_it,predicted_unnamed"]
    shipped_efficiency.cache_clear()
    left_out_efficiency.cache_clear()
    unnamed = unnamed_ratios(some)
    for row in some:
        ratios = []
        for given in (with_logs(logs), with_logs(rounded(folds[generation_of(row)]))):
            time = step_time(row.job, row.cluster, profile_of(row, given), play=True)
            ratios.append(f"{time.step_s / row.step_s:.4f}")
        lines.append(",".join([row.name, *ratios, unnamed[row.name]]))
    put(DATA / "published_training_errors.csv", "\n".join(lines) + "\n")


def unnamed_ratios(some: Sequence[PublishedRow]) -> dict[str, str]:
    """Predicted over published where no software is named: constants without the row's generation of software, and
    likely software without its source's descriptions."""
    return {
        row.name: f"{unnamed_s(row, likely(row, left_out=True), left_out=True) / row.step_s:.4f}"
        for row in some
    }


def rounded(logs: np.ndarray) -> np.ndarray:
    """As they are written."""
    return np.log([float(f"{math.exp(log):.3g}") for log in logs])


def put(path: Path, text: str) -> None:
    """Whoever reads the file meanwhile finds the old text or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, "utf-8")
    fresh.replace(path)


if __name__ == "__main__":
    main()
