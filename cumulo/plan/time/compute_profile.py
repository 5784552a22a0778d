"""Profile: how fast a generation of devices runs under a generation of software, as a few constants. `compute` and
`step` turn work into seconds with one; `cumulo calibrate` and the fitting script make them.

Nearly all constants are ratios to what the device's data sheet says, so that a profile can be carried to another
device of the same generation, and, with a wider interval, to another generation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from cumulo.base.nearest import did_you_mean
from cumulo.errors import ConfigError
from cumulo.spec.device import Device


@dataclass(frozen=True, slots=True)
class Profile:
    software: str  # the generation of software: "megatron-2021", "torchtitan-2024-compile", ...
    devices: str  # a generation of them, "hopper", or one by name, "a100-40gb"
    dtype: str  # of the matrix products
    note: str  # what the constants were taken from

    # -- what a device reaches ------------------------------------------------------------------------------
    matmul_efficiency: float  # of the peak rate, of a large matrix product
    matmul_traffic: float  # share of a product's operand traffic that its arithmetic does not hide
    attention_forward_efficiency: float  # of the 16-bit peak, causal half counted once, heads of 128
    attention_backward_efficiency: float
    # Width of a head at which softmax takes as long as the products: half the efficiency (Shah et al. 2024, section
    # 3.1: a Hopper device has 256 times more matrix FLOPs than exponentials).
    attention_half_width: float
    elementwise_passes: float  # traffic of everything between the products, over what ideal fusion would move
    score_bytes: float  # moved for each attention score in forward, where scores are stored at all
    logit_bytes: float  # moved for each logit, forward and backward together
    weight_bytes: float  # moved for each held parameter in each micro-batch: accumulation, casts, copies
    optimizer_bytes: float  # moved for each parameter the rank updates
    launch_s: float  # of one layer's forward: what the host adds that the device does not hide
    expert_passes: (
        float  # in forward over a mixture's token copies: sorted, quantised, brought back and added up
    )
    expert_bias_passes: float  # more of them, also over what is inside experts, where these have biases
    # Where the host waits for the sizes of an all-to-all: its time for each expert of a rank in a layer's forward,
    # which counts where the device is faster, and when a stage takes up another chunk; backward: twice that.
    expert_launch_s: float
    chunk_launch_s: float
    step_s: float  # of one step: data, logging, clipping, synchronisation

    # -- what of its communication a device waits for -------------------------------------------------------
    tensor_exposed: float
    tensor_overlapped_exposed: float  # with the job's `overlap_tensor`
    context_exposed: float
    expert_exposed: float
    expert_overlapped_exposed: float  # with the job's `overlap_expert`
    data_exposed: float
    data_rate: float  # of what the network could give them, the share that data-parallel collectives get
    # Gradients and weights travel in pieces of this size, each with a collective's latency; 0: layer by layer.
    bucket_bytes: float
    expert_imbalance: float  # tokens of the busiest expert rank over the mean

    # -- what "selective" recomputation repeats under this software -----------------------------------------
    selective_products: float  # share of the layer's matrix products
    selective_attention: bool  # the attention between its projections

    balances_stages: bool  # whether stages get layers by cost, the loss counted, and not by number

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not value >= 0:
                raise ConfigError(f"profile {self.name}: {field.name} must be 0 or more, got {value}")
        for name in ("matmul_efficiency", "attention_forward_efficiency", "attention_backward_efficiency"):
            if not 0 < getattr(self, name) <= 1.5:
                raise ConfigError(
                    f"profile {self.name}: {name} is a share of the device's peak, in (0, 1.5]; "
                    f"got {getattr(self, name)}"
                )

    @property
    def name(self) -> str:
        return f"{self.software} / {self.devices} / {self.dtype}"


@dataclass(frozen=True)
class Profiles:
    """All known profiles, and which is meant where only a device and a number format are named."""

    known: Mapping[str, Profile]
    current: Mapping[str, str]  # generation of devices -> software that "current" stands for

    @staticmethod
    def load(*files: Path) -> "Profiles":
        """What ships with the package, and the files that `cumulo calibrate` wrote on top."""
        text = (resources.files("cumulo.plan") / "data" / "profiles.yaml").read_text("utf-8")
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        known, current = _profiles(content, "profiles.yaml"), dict(content["current"])
        for path in files:
            try:
                extra = yaml.safe_load(path.read_text("utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise ConfigError(f"cannot read the profile {path}: {error}") from error
            if not isinstance(extra, Mapping) or "profiles" not in extra:
                raise ConfigError(f"{path} has no table `profiles`; write one with: cumulo calibrate")
            known |= _profiles({**extra, "profiles": {**content["profiles"], **extra["profiles"]}}, str(path))
            current |= extra.get("current") or {}
        return Profiles(known, current)

    def named(self, name: str) -> Profile:
        if name not in self.known:
            raise ConfigError(f"there is no profile {name!r}{did_you_mean(name, self.known, otherwise='')}")
        return self.known[name]

    def find(self, device: Device, dtype: str, software: str = "current") -> tuple[Profile, tuple[str, ...]]:
        """The profile for a device, and in what it was taken from elsewhere."""
        best = self.known[self.name_for(device, dtype, software)]
        borrowed = []
        if _device_distance(best, device) > 1:
            borrowed.append(f"no profile for {device.generation} devices: that of {best.devices} is used")
        if _dtype_distance(best.dtype, dtype):
            borrowed.append(f"no profile for {dtype} products: that of {best.dtype} is used")
        return replace(best, dtype=dtype) if best.dtype != dtype else best, tuple(borrowed)

    def name_for(self, device: Device, dtype: str, software: str = "current") -> str:
        """The profile of a software that is nearest to a number format, then to a device."""
        if software == "current":
            software = self.current.get(device.generation, self.current["other"])
        able = [name for name, profile in self.known.items() if profile.software == software]
        if not able:
            names = sorted({profile.software for profile in self.known.values()})
            hint = did_you_mean(software, names, otherwise=".")
            raise ConfigError(
                f"there is no profile of the software {software!r}{hint} There are: {', '.join(names)}"
            )

        def distance(name: str) -> tuple[int, int]:
            profile = self.known[name]
            return _dtype_distance(profile.dtype, dtype), _device_distance(profile, device)

        return min(able, key=distance)


@cache
def shipped() -> Profiles:
    return Profiles.load()


@lru_cache(256)
def shipped_for(device: Device, dtype: str, software: str) -> tuple[Profile, tuple[str, ...]]:
    """`shipped().find`, remembered: a search asks it for every layout."""
    return shipped().find(device, dtype, software)


def _device_distance(profile: Profile, device: Device) -> int:
    return 0 if profile.devices == device.name else 1 if profile.devices == device.generation else 2


def _dtype_distance(one: str, other: str) -> int:
    """16-bit formats run alike."""
    width = {"float8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
    return abs(width.get(one, 2) - width.get(other, 2))


def _profiles(content: Mapping[str, Any], where: str) -> dict[str, Profile]:
    """An entry may name another as its `base` and give only what differs."""
    entries: Mapping[str, Mapping[str, Any]] = content["profiles"]

    def resolved(name: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
        if name not in entries or name in seen:
            raise ConfigError(f"{where}: profile {(*seen, name)[0]!r} is based on {name!r}, which cannot be")
        entry = dict(entries[name])
        base = entry.pop("base", None)
        return {**(resolved(base, (*seen, name)) if base else {}), **entry}

    return {name: profile_from(resolved(name), f"{where}: profile {name}") for name in entries}


def profile_from(entry: Mapping[str, Any], where: str) -> Profile:
    known = {field.name: field.type for field in fields(Profile)}
    if unknown := sorted(set(entry) - set(known)):
        raise ConfigError(f"{where} has unknown constants: {', '.join(unknown)}")
    if missing := sorted(set(known) - set(entry)):
        raise ConfigError(f"{where} lacks: {', '.join(missing)}; give them, or a `base` that has them")
    try:
        values: dict[str, Any] = {
            name: float(value) if known[name] is float else value for name, value in entry.items()
        }
        return Profile(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
