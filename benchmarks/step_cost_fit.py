"""Fitting a ServingProfile's constants to measured runs. `simulate_serving.py` calls it.

A run is the loads of its steps and the seconds they took, step by step or in sum. Constants are positive and matter
in ratio, so they are fitted in logarithms: damped Gauss-Newton (Levenberg 1944, Marquardt 1963) on log(predicted /
measured), with a numerical Jacobian.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cumulo.errors import ConfigError
from cumulo.plan.serve.profile import Reached, ServingProfile
from cumulo.plan.serve.step_cost import StepCostModel, StepLoad

_NUDGE = 0.01
_LARGEST_STEP = 0.5  # of a constant's logarithm in one iteration


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of one model on one device, and what they took in sum."""

    name: str
    cost_of: Callable[[ServingProfile], StepCostModel]
    loads: Sequence[StepLoad]
    seconds: float
    extra_s: float = 0.0  # of it, what is no step's: taking requests in
    weight: float = 1.0

    def predicted_s(self, profile: ServingProfile) -> float:
        cost = self.cost_of(profile)
        return self.extra_s + math.fsum(sum(cost.parts(load)) for load in self.loads)


def fit(
    profile: ServingProfile,
    names: Sequence[str],
    runs: Sequence[Measured],
    iterations: int = 40,
    hold: float = 0.0,
) -> ServingProfile:
    """`profile` with the constants of these names ("layer_s", "bfloat16.matmul", "experts.matmul") fitted to runs.

    `hold` keeps those that the runs hardly tell near where they are: a factor of e counts like an error so large.
    """
    if not runs or any(not run.seconds > 0 for run in runs):
        raise ConfigError("constants are fitted to runs that took some time; there is none, or one of 0 s")
    start = np.log([get(profile, name) for name in names])
    values = start
    scale = np.sqrt([run.weight for run in runs])

    def residuals(at: NDArray[np.float64]) -> NDArray[np.float64]:
        tried = put(profile, dict(zip(names, np.exp(at).tolist(), strict=True)))
        errors = scale * np.array([math.log(run.predicted_s(tried) / run.seconds) for run in runs])
        return np.concatenate((errors, hold * (at - start)))

    now, damping = residuals(values), 1e-3
    for _ in range(iterations):
        columns = [(residuals(values + _NUDGE * unit) - now) / _NUDGE for unit in np.eye(len(names))]
        jacobian = np.stack(columns, axis=1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ now
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.eye(len(names)), -slope)
            tried = values + np.clip(step, -_LARGEST_STEP, _LARGEST_STEP)
            there = residuals(tried)
            if there @ there < now @ now:
                break
            damping *= 4
        else:
            break
        gained = float(now @ now - there @ there) / max(float(now @ now), 1e-30)
        values, now, damping = tried, there, damping / 4
        if gained < 1e-6:
            break
    return put(profile, dict(zip(names, np.exp(values).tolist(), strict=True)))


def get(profile: ServingProfile, name: str) -> float:
    kind, _, part = name.rpartition(".")
    if kind == "experts":
        return float(getattr(profile.experts, part))
    return float(getattr(profile.products[kind], part) if kind else getattr(profile, name))


def put(profile: ServingProfile, values: Mapping[str, float]) -> ServingProfile:
    for name, value in values.items():
        kind, _, part = name.rpartition(".")
        if kind == "experts":
            profile = replace(profile, experts=replace(profile.experts, **{part: value}))
        elif kind:
            changed: Reached = replace(profile.products[kind], **{part: value})
            profile = replace(profile, products={**profile.products, kind: changed})
        else:
            profile = replace(profile, **{name: value})  # type: ignore[arg-type]
    return profile
