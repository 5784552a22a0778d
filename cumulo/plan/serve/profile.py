"""ServingProfile: how fast the engine plays steps on a device, as a few constants. `step_cost` turns work into
seconds with one; `benchmarks/simulate_serving.py` fits them to measured runs.

What a device reaches is kept as ratios to its data sheet, so that a profile can be carried to another device;
what does not scale with it (launches, the host) is kept in seconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from cumulo.base.strict import package_yaml
from cumulo.errors import ConfigError
from cumulo.spec.device import Device


@dataclass(frozen=True, slots=True)
class Reached:
    """What matrix products of one number format reach of the data sheet."""

    bandwidth: float  # of the memory's, while weights stream past few tokens
    matmul: float  # of the peak rate, with many tokens
    # Weights stream while products are computed, but not quite: seconds are (memory^p + compute^p)^(1/p).
    overlap: float


@dataclass(frozen=True, slots=True)
class Host:
    """The processor that runs the engine's loop."""

    submit_s: float  # plan a step and hand it to the device
    submit_row_s: float  # ... for each sequence in it
    apply_s: float  # take its tokens in
    apply_row_s: float
    arrival_s: float  # take a request in
    arrival_token_s: float
    # ... for each further rank of the engine: a plan of 256 rows to 4 ranks takes 94 µs of an ARM core, halved as
    # the others are (docs/serving-ranks.md).
    submit_rank_s: float = 12e-6
    prompt_submit_s: float = 0.0  # more for a step that computes prompts: it is not one captured launch


@dataclass(frozen=True, slots=True)
class ServingProfile:
    device: str  # of the catalogue, on which it was measured
    evidence: str  # what the constants were taken from, which runs were fitted and which held out
    error: float  # of step times: nine of ten measured runs lie within it
    products: Mapping[str, Reached] = field(hash=False)  # by weight format
    experts: Reached  # of grouped products; `matmul`: over what other products of their format reach
    kv_bandwidth: float  # of the memory's, while keys and values are read
    # Keys and values that several sequences of a step share are read again from the cache, so many times faster.
    shared_kv_speedup: float
    attention: float  # of the 16-bit peak, for prompts
    elementwise: float  # of the memory's bandwidth, between products
    draw_passes: float  # over a draw's logits
    layer_s: float  # of one layer whatever its size: its kernels follow one another
    batch_layer_s: float  # ... more, for many sequences: attention's last tiles leave processors idle
    expert_layer_s: float  # ... more, for routing and gathering
    step_s: float  # of one step
    rounds_up: bool  # steps are padded to captured shapes
    host: Host
    collectives: float = 1.0  # seconds between ranks, over those of the network model
    # All-reduces add in the switch (NVLink SHARP): a rank sends its part once, not 2·(n − 1)/n times
    adds_in_switch: bool = False
    # What the device waits for the host, where an engine's loop is not hidden behind it: for each sequence of a
    # step, and for each layer of a step that computes prompts, whose kernels are launched one by one.
    row_s: float = 0.0
    prompt_layer_s: float = 0.0


@cache
def shipped_profiles() -> Mapping[str, ServingProfile]:
    """By the device's name in the catalogue."""
    tables = package_yaml("cumulo.plan", "data/serving.yaml")
    return {name: read_profile(name, fields) for name, fields in tables.items()}


def read_profile(device: str, fields: Mapping[str, Any]) -> ServingProfile:
    try:
        return ServingProfile(
            device=device,
            products={name: Reached(**one) for name, one in fields["products"].items()},
            experts=Reached(**fields["experts"]),
            host=Host(**fields["host"]),
            **{name: value for name, value in fields.items() if name not in ("products", "experts", "host")},
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"the serving profile of {device} is incomplete: {error}") from error


def profile_for(device: Device) -> ServingProfile:
    """The device's own profile, or the nearest one carried over, with a wider error."""
    known = shipped_profiles()
    if device.name in known:
        return known[device.name]
    if device.generation == "cpu":
        return replace(known["neoverse-n1"], error=0.5, evidence=_carried(known["neoverse-n1"], device))
    hopper = known["h200"]
    error = 0.12 if device.generation == "hopper" else 0.25
    return replace(hopper, error=error, evidence=_carried(hopper, device))


def _carried(profile: ServingProfile, device: Device) -> str:
    return f"{device.name} has not been measured: the ratios of {profile.device} on its data sheet"


# Saturation: what another engine's published throughputs say it reaches, as a ServingProfile. Read by `replica`.
#
# The constants are fitted to TensorRT-LLM's tables of three versions (`benchmarks/fit_serving.py`); what they say
# nothing about is what Cumulo's own runs on an H200 gave. They are validated by `cumulo plan validate serving`,
# whose predictions go through the same step costs as those of `cumulo plan serve`.
@dataclass(frozen=True, slots=True)
class Saturation:
    """What a saturated engine reaches."""

    products_8bit: float  # of the peak rate
    products_4bit: float
    experts: float  # of what products of their format reach, of grouped ones
    layer_s: float  # of one layer in one step, whatever its size
    prompt_layer_s: float  # ... more, in a step that computes prompts
    row_s: float  # of one sequence in one step
    communication: float  # seconds over those of the network model
    most_running: float
    reserved: float  # of a device's memory, more than Cumulo's own ledger leaves free of keys and values

    def profile(self) -> ServingProfile:
        own = shipped_profiles()["h200"]
        plain, narrow = own.products["bfloat16"], own.products["float8"]
        return replace(
            own,
            products={
                "bfloat16": plain,
                "float8": replace(narrow, matmul=self.products_8bit),
                "float4": replace(narrow, matmul=self.products_4bit),
            },
            experts=replace(narrow, matmul=self.experts),
            layer_s=self.layer_s,
            batch_layer_s=0.0,
            expert_layer_s=0.0,
            step_s=0.0,
            rounds_up=False,
            collectives=self.communication,
            adds_in_switch=True,
            row_s=self.row_s,
            evidence="TensorRT-LLM's published throughputs, 0.20, 1.0 and 1.2 (`cumulo plan validate serving`)",
            prompt_layer_s=self.prompt_layer_s,
        )


def fitted_file() -> Any:
    return package_yaml("cumulo.plan", "data/published_serving.yaml")


@cache
def constants(left_out: str = "") -> Saturation:
    """Constants of all rows; or of those that are not of a model, a device or a source: `model llama-3.1-8b`,
    `device h200`, `source trtllm-1.0`."""
    content = fitted_file()
    return Saturation(**(content["left_out"][left_out] if left_out else content["all"]))


@cache
def published_profile() -> ServingProfile:
    return constants().profile()


# Confidence: how far predicted step times may be off, and what says so. Search and reports ask a Replica for it.
#
# Ranges are 90% ranges. For what Cumulo measured itself they come from its own runs; for everything else from
# published throughputs predicted by constants that never saw them (`cumulo plan validate serving --left-out`).
_MOST_MEASURED = 8  # GPUs that compute a step together, of the tables


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


def confidence_of(
    device: Device, ranks: int, own_engine: bool, kind: Literal["dense", "mixture"] = "dense"
) -> Confidence:
    """`kind`: of the model; `ranks`: GPUs that compute one step together."""
    own = profile_for(device)
    if own_engine and (device.generation == "cpu" or (device.name in shipped_profiles() and ranks == 1)):
        return Confidence(own.error, own.evidence)
    errors, folds = fitted_file()["errors"], fitted_file()["left_out"]
    model, elsewhere = float(errors["model"][kind]), float(errors["device"][kind])
    whose = "constants of Cumulo's runs on one H200" if own_engine else "constants of TensorRT-LLM's tables"
    models = {"dense": "dense models", "mixture": "mixtures of experts"}[kind]
    held = f"published throughputs of {models} that were left out are within {model:.0%} (90%)"
    if f"device {device.name}" in folds and ranks <= _MOST_MEASURED:
        return Confidence(model, f"{whose}; {held}")
    near = device.generation in ("hopper", "blackwell")
    error = math.hypot(model, elsewhere if near else 2 * elsewhere)
    why = (
        f"which is extrapolated: no published table is of more than {_MOST_MEASURED} GPUs a model"
        if ranks > _MOST_MEASURED
        else "which nobody measured for us"
    )
    return Confidence(error, f"{whose} on the data sheet of {device.name}, {why}; {held}")
