"""Saturation: what another engine's published throughputs say it reaches, as a ServingProfile. Read by `replica`.

The constants are fitted to TensorRT-LLM's tables (`benchmarks/fit_serving.py`), and drawn to what Cumulo's own runs
on an H200 gave. They are validated by `cumulo plan validate serving`, whose predictions go through the same step
costs as those of `cumulo plan serve`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

from cumulo.plan.serve.profile import Reached, ServingProfile, profile_for, shipped_profiles
from cumulo.spec.device import Device

_OVERLAP = 3.0  # weights stream while products are computed, as in Cumulo's profiles


@dataclass(frozen=True, slots=True)
class Saturation:
    """What a saturated engine reaches."""

    products_8bit: float  # of the peak rate
    products_4bit: float
    weights: float  # of the memory's bandwidth, while weights stream
    kv: float  # ... while keys and values are read
    attention: float  # of the 16-bit peak, for prompts
    passes: float  # between products, over ideal fusion
    layer_s: float  # of one layer in one step, whatever its size
    all_reduce: float  # seconds over those of the network model
    experts: float  # of the peak rate, of grouped products
    most_running: float
    reserved: float  # of a device's memory, more than Cumulo's own ledger leaves free of keys and values

    def profile(self) -> ServingProfile:
        own = shipped_profiles()["h200"]
        plain = own.products["bfloat16"]
        return replace(
            own,
            products={
                "bfloat16": Reached(self.weights, plain.matmul, _OVERLAP),
                "float8": Reached(self.weights, self.products_8bit, _OVERLAP),
                "float4": Reached(self.weights, self.products_4bit, _OVERLAP),
            },
            experts=Reached(self.weights, self.experts, _OVERLAP),
            kv_bandwidth=self.kv,
            attention=self.attention,
            elementwise=1 / self.passes,
            layer_s=self.layer_s,
            batch_layer_s=0.0,
            expert_layer_s=0.0,
            step_s=0.0,
            rounds_up=False,
            collectives=self.all_reduce,
            adds_in_switch=True,
        )


@cache
def fitted_file() -> Mapping[str, Any]:
    text = (resources.files("cumulo.plan") / "data" / "published_serving.yaml").read_text("utf-8")
    content: Mapping[str, Any] = yaml.safe_load(text)
    return content


@cache
def constants(left_out: str = "") -> Saturation:
    """Of all rows; or of those that are not of a model or a device: `model llama-3.1-8b`, `device h200`."""
    content = fitted_file()
    return Saturation(**(content["left_out"][left_out] if left_out else content["all"]))


@cache
def published_profile() -> ServingProfile:
    return constants().profile()


# Confidence: how far predicted step times may be off, and what says so. Search and reports ask a Replica for it.
#
# Ranges are 90% ranges. For what Cumulo measured itself they come from its own runs; for everything else from
# published throughputs predicted by constants that never saw them (`cumulo plan validate serving --left-out`).
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
