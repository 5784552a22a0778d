"""Saturation: what another engine's published throughputs say it reaches, as a ServingProfile. Read by `replica`.

The constants are fitted to TensorRT-LLM's tables (`benchmarks/fit_serving.py`), and drawn to what Cumulo's own runs
on an H200 gave. They are validated by `cumulo plan validate serving`, whose predictions go through the same step
costs as those of `cumulo plan serve`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

from cumulo.plan.serve.profile import Reached, ServingProfile, shipped_profiles

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
