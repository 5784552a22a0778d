"""Fits what a saturated engine reaches to published serving throughputs, also without each model and each device.

    python benchmarks/fit_serving.py            # prints errors, fitted and left out
    python benchmarks/fit_serving.py --write    # ... and writes the constants into the package

Damped Gauss–Newton steps on the constants' logarithms; each is drawn to what Cumulo's own runs on an H200 gave
(`serving.yaml`) or to what its meaning suggests.
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

# constant: (prior, how many times off it may easily be). From our own H200 runs: all but products_4bit, all_reduce,
# most_running and reserved.
PRIORS = {
    "products_8bit": (0.6264, 1.05),
    "products_4bit": (0.45, 1.2),
    "weights": (0.85, 1.05),
    "kv": (0.885, 1.05),
    "attention": (0.5589, 1.1),
    "passes": (1.15, 1.1),
    "layer_s": (3.3e-5, 1.3),
    "all_reduce": (0.7, 1.3),
    "experts": (0.4573, 1.15),
    "most_running": (3000.0, 1.2),
    "reserved": (0.1, 2.0),
}
NOISE = 0.06
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
        if gained < 1e-2:
            break
    return logs


def spread(error: np.ndarray) -> str:
    off = np.abs(np.expm1(error))
    return f"{len(off)} rows, median {np.median(off):.1%}, p90 {np.quantile(off, 0.9):.1%}"


def p90(error: np.ndarray) -> float:
    return float(f"{np.quantile(np.abs(np.expm1(error)), 0.9):.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the constants into the package")
    options = parser.parse_args()
    rows = served_rows()
    every = fit(rows)
    print(f"fitted: {spread(errors(every, rows))}")
    folds, largest = {}, {"fitted": p90(errors(every, rows))}
    for key in ("model", "device"):
        out = []
        for name in dict.fromkeys(getattr(row, key) for row in rows):
            logs = fit([row for row in rows if getattr(row, key) != name])
            left = [row for row in rows if getattr(row, key) == name]
            folds[f"{key} {name}"] = asdict(saturation(logs))
            out.append(errors(logs, left))
            print(f"  without {name}: {spread(out[-1])}")
        largest[key] = p90(np.concatenate(out))
        print(f"{key} left out: {spread(np.concatenate(out))}")
    if options.write:
        path = Path(str(resources.files("cumulo.plan") / "data" / "published_serving.yaml"))
        content = {"errors": largest, "all": asdict(saturation(every)), "left_out": folds}
        head = "# Fields: cumulo/plan/serve/profile.py. Fitted by benchmarks/fit_serving.py.\n"
        path.write_text(head + yaml.safe_dump(content, sort_keys=False), "utf-8")


if __name__ == "__main__":
    main()
