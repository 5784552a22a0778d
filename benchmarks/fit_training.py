"""Fits the constants of `cumulo/plan/data/profiles.yaml` to the published rows that are not held out.

    python benchmarks/fit_training.py                      # prints what changes
    python benchmarks/fit_training.py --write              # and writes it into the package
    python benchmarks/fit_training.py --only fsdp-2023     # one generation of software
    python benchmarks/fit_training.py --leave-out source   # errors of each source under constants fitted without it

For each family of profiles, the logarithms of a few constants are moved by damped Gauss–Newton steps (Levenberg
1944, Marquardt 1963) so that log(predicted / published) becomes small over its rows. Rows far off count less
(weights of an L1 fit), and each constant is drawn to the value it has in `training_families.py`, which is what its
meaning suggests, so that rows which say nothing about it leave it there.
"""

import argparse
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml
from training_families import FAMILIES, LIMITS, PRIORS, TIED, Family

from cumulo.plan.evidence.published import PublishedRow, rows
from cumulo.plan.evidence.weights import half_width
from cumulo.plan.time import compute_profile
from cumulo.plan.time.compute_profile import Profile, Profiles
from cumulo.plan.time.step import step_time

PROFILES = Path(compute_profile.__file__).parents[1] / "data" / "profiles.yaml"

FOLDS = 5
NOISE = 0.03  # errors below this count by their square, above by their size
Rows = Mapping[str, Sequence[PublishedRow]]  # by profile


class Fit:
    """One family, its rows, and the search for its constants."""

    def __init__(self, family: Family, profiles: Mapping[str, Profile], mine: Rows) -> None:
        self.family, self.start, self.rows = family, dict(profiles), mine
        self.names = family.parameters
        self.prior = np.log([PRIORS[name][0] for _, name in self.names])
        self.looseness = np.log([PRIORS[name][1] for _, name in self.names])
        self.entries = yaml.safe_load(PROFILES.read_text("utf-8"))["profiles"]
        self.played: dict[str, float] = {}

    def profiles(self, logs: np.ndarray) -> dict[str, Profile]:
        fitted = {key: float(np.exp(log)) for key, log in zip(self.names, logs, strict=True)}
        found = {}
        for profile in self.family.own:
            values: dict[str, float] = {}
            for name in dict.fromkeys(name for _, name in self.names):
                owner = self._owner(profile, name)
                if owner is not None:
                    values[name] = min(fitted[owner, name], LIMITS.get(name, math.inf))
                    other, ratio = TIED.get(name, ("", 1.0))
                    if other and not any(other == each for _, each in self.names):
                        values[other] = values[name] * ratio
            found[profile] = replace(self.start[profile], **values)  # type: ignore[arg-type]
        return found

    def _owner(self, profile: str, name: str) -> str | None:
        """The profile of the family that this one has a fitted constant from; None: its entry gives it by hand."""
        at: str | None = profile
        while at is not None:
            if (at, name) in self.names:
                return at
            if name in self.entries[at]:
                return None
            at = self.entries[at].get("base")
        return None

    def errors(self, profiles: Mapping[str, Profile], rows: Rows) -> np.ndarray:
        """log(predicted / published), the schedule taken as its bound times what playing it has added so far."""
        return np.array(
            [
                math.log(step_time(row.job, row.cluster, profiles[name], play=False).step_s)
                + math.log(self.played.get(row.name, 1.0) / row.step_s)
                for name, some in rows.items()
                for row in some
            ]
        )

    def play(self, profiles: Mapping[str, Profile], rows: Rows) -> None:
        for name, some in rows.items():
            for row in some:
                if row.job.layout.pp > 1:
                    played, bound = (
                        step_time(row.job, row.cluster, profiles[name], play=play).step_s
                        for play in (True, False)
                    )
                    self.played[row.name] = played / bound

    def loss(self, logs: np.ndarray, error: np.ndarray) -> float:
        far = np.sum(np.sqrt(error**2 + NOISE**2) - NOISE) / NOISE
        return float(far + 0.5 * np.sum(((logs - self.prior) / self.looseness) ** 2))

    def run(self, rounds: int = 40, from_prior: bool = False) -> dict[str, Profile]:
        logs = np.log([max(getattr(self.start[profile], name), 1e-9) for profile, name in self.names])
        if from_prior:
            logs = self.prior.copy()
        self.play(self.profiles(logs), self.rows)
        error, damping = self.errors(self.profiles(logs), self.rows), 1e-2
        for turn in range(rounds):
            if turn in (4, 12):
                self.play(self.profiles(logs), self.rows)
                error = self.errors(self.profiles(logs), self.rows)
            weight = 1 / (NOISE * np.sqrt(error**2 + NOISE**2))
            slope = np.empty((len(error), len(logs)))
            for column in range(len(logs)):
                shifted = logs.copy()
                shifted[column] += 0.02
                slope[:, column] = (self.errors(self.profiles(shifted), self.rows) - error) / 0.02
            curvature = slope.T @ (weight[:, None] * slope) + np.diag(1 / self.looseness**2)
            gradient = slope.T @ (weight * error) + (logs - self.prior) / self.looseness**2
            before = self.loss(logs, error)
            for _ in range(6):
                step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
                trial = logs - np.clip(step, -0.5, 0.5)
                trial_error = self.errors(self.profiles(trial), self.rows)
                if self.loss(trial, trial_error) < before:
                    logs, error, damping = trial, trial_error, damping / 3
                    break
                damping *= 4
            if before - self.loss(logs, error) < 1e-3 and turn > 12:
                break
        return self.profiles(logs)


def spread(error: np.ndarray) -> str:
    if not len(error):
        return "no rows"
    off = np.abs(np.expm1(error))
    return f"{len(off)} rows, median {np.median(off):.1%}, p90 {np.quantile(off, 0.9):.1%}, worst {off.max():.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the constants into the package")
    parser.add_argument(
        "--errors", action="store_true", help="only write the errors that the constants leave"
    )
    parser.add_argument(
        "--leave-out", choices=list(KEYS), help="refit without each of these in turn, and print its errors"
    )
    parser.add_argument("--only", default="", help="families whose name begins so")
    parser.add_argument("--worst", type=int, default=0, help="print this many rows that are furthest off")
    options = parser.parse_args()
    if options.errors:
        write_errors(options.only)
        return
    if options.leave_out:
        leave_out(options.leave_out, options.only)
        return
    every: dict[bool, list[float]] = {False: [], True: []}
    for title, family in FAMILIES.items():
        if not title.startswith(options.only):
            continue
        profiles, mine = rows_of_family(family)
        seen = kept(mine, lambda row: not row.held_out)
        fit = Fit(family, profiles, seen)
        found = fit.run()
        print(f"{title}: {len(family.parameters)} constants")
        for owner, name in family.parameters:
            before, after = getattr(profiles[owner], name), getattr(found[owner], name)
            print(f"  {owner:44} {name:30} {before:10.4g} -> {after:10.4g}")
        for name, some in mine.items():
            for label, held_out in (("fitted", False), ("held out", True)):
                chosen = [row for row in some if row.held_out is held_out]
                fit.play(found, {name: chosen})
                error = fit.errors(found, {name: chosen})
                every[held_out] += list(error)
                print(f"  {name} {label}: {spread(error)}")
                for index in np.argsort(-np.abs(error))[: options.worst]:
                    print(f"      {np.expm1(error[index]):+7.1%}  {chosen[index].name}")
        if options.write:
            write(family, found)
    if options.write:
        write_notes()
        write_errors(options.only)
    for label, held_out in (("fitted", False), ("held out", True)):
        print(f"all {label}: {spread(np.array(every[held_out]))}")


def rows_of_family(family: Family) -> tuple[dict[str, Profile], dict[str, list[PublishedRow]]]:
    known = Profiles.load()
    profiles = {name: known.named(name) for name in family.own}
    mine = {name: [row for row in rows() if of_profile(row, profiles[name], known)] for name in profiles}
    return profiles, mine


def kept(some: Rows, want: Callable[[PublishedRow], bool]) -> dict[str, list[PublishedRow]]:
    return {name: [row for row in mine if want(row)] for name, mine in some.items()}


def ways(row: PublishedRow) -> list[str]:
    layout = row.job.layout
    sizes = {"tensor": layout.tp, "pipeline": layout.pp, "context": layout.cp}
    return [name for name, size in sizes.items() if size > 1] + ["experts"] * (row.job.model.moe is not None)


# What rows can be left out by: a row is left out with each of its names.
KEYS: dict[str, Callable[[PublishedRow], list[str]]] = {
    "source": lambda row: [row.source],
    "model": lambda row: [f"{row.job.model.layers} layers of {row.job.model.hidden}"],
    "way": ways,
}


def leave_out(what: str, only: str) -> None:
    """What rows nobody has seen will look like: the errors of all rows of a source (a model, a way to split), under
    constants that were fitted, from what their meaning suggests, to the other rows of its family alone."""
    every: list[float] = []
    inside: list[bool] = []
    for title, family in FAMILIES.items():
        if not title.startswith(only):
            continue
        profiles, mine = rows_of_family(family)
        for name in dict.fromkeys(name for some in mine.values() for row in some for name in KEYS[what](row)):
            rest = kept(mine, lambda row, name=name: name not in KEYS[what](row) and not row.held_out)
            fit = Fit(family, profiles, rest)
            found = fit.run(rounds=15, from_prior=True)
            out = kept(mine, lambda row, name=name: name in KEYS[what](row))
            fit.play(found, out)
            error = fit.errors(found, out)
            every += list(error)
            left = [row for some in out.values() for row in some]
            names = {row.name for row in left}
            widths = [half_width(row.job, row.cluster, without=names) for row in left]
            covered = [bool(abs(off) <= width) for off, width in zip(error, widths, strict=True)]
            inside += covered
            others = sum(map(len, rest.values()))
            print(
                f"{title}, without {name}: {spread(error)}; {sum(covered)} in the interval; by {others} others"
            )
    print(f"all: {spread(np.array(every))}; {sum(inside) / len(inside):.0%} in the interval")


def of_profile(row: PublishedRow, profile: Profile, known: Profiles) -> bool:
    found, _ = known.find(row.cluster.device, row.job.dtype, row.job.software)
    return (found.software, found.devices, found.dtype) == (profile.software, profile.devices, profile.dtype)


def write(family: Family, found: Mapping[str, Profile]) -> None:
    """Puts the constants into the profiles' entries, leaving comments and everything else."""
    for owner, name in family.parameters:
        set_constant(owner, name, f"{getattr(found[owner], name):.3g}")
        other = TIED.get(name, ("",))[0]
        if other and all(other != each for _, each in family.parameters):
            set_constant(owner, other, f"{getattr(found[owner], other):.3g}")


def write_notes() -> None:
    """Says in every profile what it was fitted to."""
    known = Profiles.load()
    for family in FAMILIES.values():
        for name in family.own:
            mine = [row for row in rows() if of_profile(row, known.named(name), known)]
            seen = sum(not row.held_out for row in mine)
            set_constant(name, "note", f'"fitted to {seen} published rows, {len(mine) - seen} more held out"')


def set_constant(profile: str, name: str, value: str) -> None:
    text = PROFILES.read_text("utf-8")
    start = text.index(f"\n  {profile}:\n") + 1
    after = re.compile(r"^  \S", re.MULTILINE).search(text, text.index("\n", start) + 1)
    end = after.start() if after else len(text)
    entry, line = text[start:end], f"    {name}: {value}"
    pattern = re.compile(rf"^    {name}: .*$", re.MULTILINE)
    entry = pattern.sub(line, entry) if pattern.search(entry) else entry.rstrip("\n") + f"\n{line}\n"
    put(PROFILES, text[:start] + entry + text[end:])


def write_errors(only: str) -> None:
    """Each row's error under the constants, and under constants fitted without it and its fold: an error that has
    not been fitted away, of which intervals are made."""
    path = PROFILES.parent / "published_training_errors.csv"
    written = (
        {line.split(",")[0]: line for line in path.read_text("utf-8").splitlines()[1:]}
        if path.exists()
        else {}
    )
    for title, family in FAMILIES.items():
        if not title.startswith(only):
            continue
        profiles, mine = rows_of_family(family)
        seen = kept(mine, lambda row: not row.held_out)
        without: dict[str, float] = {}
        for fold in range(FOLDS):
            out = kept(seen, lambda row, fold=fold: fold_of(row) == fold)
            if not any(out.values()):
                continue
            rest = kept(seen, lambda row, fold=fold: fold_of(row) != fold)
            found = Fit(family, profiles, rest).run(rounds=6)
            for name, some in out.items():
                for row in some:
                    without[row.name] = (
                        step_time(row.job, row.cluster, found[name], play=True).step_s / row.step_s
                    )
        for name, some in mine.items():
            for row in some:
                ratio = step_time(row.job, row.cluster, profiles[name], play=True).step_s / row.step_s
                other = f"{without[row.name]:.4f}" if row.name in without else ""
                written[row.name] = f"{row.name},{ratio:.4f},{other}"
    lines = [written[row.name] for row in rows() if row.name in written]
    put(path, "\n".join(["id,predicted_over_published,predicted_without_it", *lines]) + "\n")


def put(path: Path, text: str) -> None:
    """Whoever reads the file meanwhile finds the old text or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, "utf-8")
    fresh.replace(path)


def fold_of(row: PublishedRow) -> int:
    return zlib.crc32(f"fold {row.name}".encode()) % FOLDS


if __name__ == "__main__":
    main()
