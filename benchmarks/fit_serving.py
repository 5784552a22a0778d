"""Fits what a saturated engine reaches to published throughputs, also without each model, device and source.

    python benchmarks/fit_serving.py            # prints errors, fitted and left out
    python benchmarks/fit_serving.py --write    # ... and writes the constants into the package

Damped Gauss–Newton steps on the constants' logarithms; each is drawn to what its meaning suggests.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib import resources
from pathlib import Path

import numpy as np
import yaml

from cumulo.plan.evidence.serving import ServedRow, saturated_tokens_per_s, served_rows
from cumulo.plan.serve.profile import Saturation

# constant: (prior, how many times off it may easily be)
PRIORS = {
    "products_8bit": (0.6264, 1.1),
    "products_4bit": (0.45, 1.2),
    "experts": (0.6, 1.5),
    "layer_s": (2.5e-5, 1.5),
    "prompt_layer_s": (1.2e-4, 1.5),
    "row_s": (1e-5, 2.0),
    "communication": (1.0, 1.3),
    "most_running": (2048.0, 1.2),
    "reserved": (0.1, 1.3),
}
NOISE = 0.08
PRIOR = np.log([PRIORS[field.name][0] for field in fields(Saturation)])
LOOSE = np.log([PRIORS[field.name][1] for field in fields(Saturation)])


def saturation(logs: np.ndarray) -> Saturation:
    return Saturation(*(float(f"{math.exp(log):.3g}") for log in logs))


def errors(logs: np.ndarray, rows: Sequence[ServedRow]) -> np.ndarray:
    given = Saturation(*np.exp(logs).tolist())
    return np.array([math.log(saturated_tokens_per_s(row, given) / row.tokens_per_s) for row in rows])


def fit(rows: Sequence[ServedRow]) -> np.ndarray:
    def loss(logs: np.ndarray, error: np.ndarray) -> float:
        far = np.sum(np.sqrt(error**2 + NOISE**2) - NOISE) / NOISE
        return float(far + 0.5 * np.sum(((logs - PRIOR) / LOOSE) ** 2))

    logs, damping = PRIOR.copy(), 1e-2
    error = errors(logs, rows)
    for _ in range(25):
        slope = np.array([(errors(logs + 0.02 * one, rows) - error) / 0.02 for one in np.eye(len(logs))]).T
        weight = 1 / (NOISE * np.sqrt(error**2 + NOISE**2))
        curvature = slope.T @ (weight[:, None] * slope) + np.diag(1 / LOOSE**2)
        gradient = slope.T @ (weight * error) + (logs - PRIOR) / LOOSE**2
        before, gained = loss(logs, error), 0.0
        for _ in range(6):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            trial = logs - np.clip(step, -0.4, 0.4)
            found = errors(trial, rows)
            if loss(trial, found) < before:
                gained, logs, error, damping = before - loss(trial, found), trial, found, damping / 3
                break
            damping *= 4
        if gained < 3e-2:
            break
    return logs


def spread(error: np.ndarray) -> str:
    off = np.abs(np.expm1(error))
    return f"{len(off)} rows, median {np.median(off):.1%}, p90 {np.quantile(off, 0.9):.1%}"


def p90(error: np.ndarray) -> float:
    """Nine of ten lie within a factor of 1 and this."""
    return float(f"{math.expm1(np.quantile(np.abs(error), 0.9)):.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the constants into the package")
    options = parser.parse_args()
    rows = served_rows()
    every = fit(rows)
    print(f"fitted: {spread(errors(every, rows))}", saturation(every))
    folds, left_out = {}, {}
    for key in ("model", "device", "source"):
        for name in dict.fromkeys(getattr(row, key) for row in rows):
            logs = fit([row for row in rows if getattr(row, key) != name])
            left = [row for row in rows if getattr(row, key) == name]
            folds[f"{key} {name}"] = asdict(saturation(logs))
            left_out[key, name] = list(zip(left, errors(logs, left), strict=True))
            print(f"  without {name}: {spread(errors(logs, left))}", flush=True)
    found: dict[str, dict[str, float]] = {}
    promised: dict[str, dict[str, float]] = {}
    for key in ("model", "device", "source"):
        pairs = [pair for (by, _), some in left_out.items() if by == key for pair in some]
        print(f"{key} left out: {spread(np.array([error for _, error in pairs]))}")
        for kind in ("dense", "mixture"):
            some = [(getattr(row, key), error) for row, error in pairs if row.kind == kind]
            found.setdefault(key, {})[kind] = p90(np.array([error for _, error in some]))
            print(f"  {kind}: {spread(np.array([error for _, error in some]))}")
            for name in dict(some):
                others = np.array([error for other, error in some if other != name])
                promised.setdefault(f"{key} {name}", {})[kind] = p90(others)
    if options.write:
        path = Path(str(resources.files("cumulo.plan") / "data" / "published_serving.yaml"))
        content = {"errors": found, "promised": promised, "all": asdict(saturation(every)), "left_out": folds}
        head = (
            "# Fields: cumulo/plan/serve/profile.py; fitted by benchmarks/fit_serving.py. errors: nine of ten\n"
            "# rows of a kind that were left out are within; promised: what other groups say of one.\n"
        )
        path.write_text(head + yaml.safe_dump(content, sort_keys=False), "utf-8")


if __name__ == "__main__":
    main()
