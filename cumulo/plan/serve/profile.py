"""ServingProfile: how fast the engine plays steps on a device, as a few constants. `step_cost` turns work into
seconds with one; `benchmarks/simulate_serving.py` fits them to measured runs.

What a device reaches is kept as ratios to its data sheet, so that a profile can be carried to another device; what
does not scale with it (launches, the host) is kept in seconds.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

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
    experts: Reached  # of grouped products
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"products": {name: asdict(one) for name, one in self.products.items()}}


@cache
def shipped_profiles() -> Mapping[str, ServingProfile]:
    """By the device's name in the catalogue."""
    text = (resources.files("cumulo.plan") / "data" / "serving.yaml").read_text("utf-8")
    return {name: read_profile(name, fields) for name, fields in yaml.safe_load(text).items()}


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
