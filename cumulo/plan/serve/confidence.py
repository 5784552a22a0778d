"""Confidence: how far predicted step times may be off, and what says so. Search and reports ask a Replica for it.

Ranges are 90% ranges. For what Cumulo measured itself they come from its own runs; for everything else from
published throughputs predicted by constants that never saw them (`cumulo plan validate serving --left-out`).
"""

import math
from dataclasses import dataclass

from cumulo.plan.serve.profile import profile_for, shipped_profiles
from cumulo.plan.serve.published_engine import fitted_file
from cumulo.spec.device import Device


@dataclass(frozen=True, slots=True)
class Confidence:
    error: float  # nine of ten measurements lie within a factor of 1 + error
    evidence: str

    @property
    def slowest(self) -> float:
        """Of a step, over what is predicted."""
        return 1 + self.error

    @property
    def fastest(self) -> float:
        return 1 / (1 + self.error)


def confidence_of(device: Device, ranks: int, own_engine: bool) -> Confidence:
    own = profile_for(device)
    if own_engine and (device.generation == "cpu" or (device.name in shipped_profiles() and ranks == 1)):
        return Confidence(own.error, own.evidence)
    errors, folds = fitted_file()["errors"], fitted_file()["left_out"]
    model, elsewhere = float(errors["model"]), float(errors["device"])
    whose = "constants of Cumulo's runs on one H200" if own_engine else "constants of TensorRT-LLM's tables"
    held = f"published throughputs of models that were left out are within {model:.0%} (90%)"
    if f"device {device.name}" in folds:
        return Confidence(model, f"{whose}; {held}")
    known = {one.removeprefix("device ") for one in folds}
    near = device.generation in ("hopper", "blackwell") and bool(known)
    error = math.hypot(model, elsewhere if near else model)
    return Confidence(
        error, f"{whose} on the data sheet of {device.name}, which nobody measured for us; {held}"
    )
