"""Profiles put together from physics and traits: what a device of a generation reaches under a software, from
`data/efficiency.yaml`. `compute_profile` asks it for every software that was not measured by itself.

A product reaches its device's measured ceiling times a share that all software has in common. Software differs in
traits that whoever runs it knows: its attention kernels, whether what lies between products is fused, how experts
are computed. There is no constant of a single software, so a new one starts where its traits put it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

from cumulo.base.strict import package_yaml
from cumulo.errors import ConfigError
from cumulo.spec.device import Device


# Profile: how fast a generation of devices runs under a generation of software, as a few constants. `compute` and
# `step` turn work into seconds with one; `efficiency`, `cumulo calibrate` and the catalogue make them.
#
# Nearly all constants are ratios to what the device's data sheet says, so that a profile can be carried to another
# device of the same generation, and, with a wider interval, to another generation.
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

    # Whether stages wait until a message between them has arrived: "" not, "slice" a tensor-parallel rank's part of
    # an activation (Narayanan et al. 2021, section 4.1), "whole" all of it (DeepSpeed's pipeline).
    waits_for_messages: Literal["", "slice", "whole"]
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


HIGHEST_SHARE = 0.92  # of its peak, that no product has reached on any device
GENERATIONS = ("ampere", "hopper", "blackwell")


@dataclass(frozen=True, slots=True)
class Software:
    """Traits of a generation of software."""

    name: str
    attention: Literal["unfused", "flash1", "flash2", "cudnn"] = "cudnn"
    between: Literal["eager", "fused", "compiled"] = "fused"
    row_scaled: bool = False
    fused_experts: tuple[str, ...] = ()
    runs: tuple[str, ...] = ("tensor", "pipeline", "experts")  # what it can do beside data parallelism
    deepspeed_collectives: bool = False
    selective_products: float = 0.0
    selective_attention: bool = True
    balances_stages: bool = False
    bucket_bytes: float = 0.0
    waits_for_messages: Literal["", "slice", "whole"] = ""
    # What its jobs do unless they say otherwise.
    overlaps_tensor: bool = False
    overlaps_data: bool = True
    whole_experts: bool = False
    exchanges_once: bool = False
    overlaps_experts: bool = False
    sequence_parallel: bool = True  # where there is tensor parallelism
    zero: Literal[0, 1, 2, 3] = 1
    gradient_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    note: str = ""
    released: str = ""  # year and month, where a framework has several versions here

    @property
    def framework(self) -> str:
        """The software's name without its year."""
        return self.name.rpartition("-")[0] or self.name

    @property
    def flash_attention(self) -> bool:
        return self.attention != "unfused"

    def sums_gradients_in(self, dtype: str) -> Literal["float32", "bfloat16", "float16"]:
        """For products of a number format: DeepSpeed sums those of float16 as they come."""
        return "float16" if self.deepspeed_collectives and dtype == "float16" else self.gradient_dtype


# Software that goes under several names and is left out together.
_ONE_GENERATION = {
    "deepspeed-2021": "megatron-2021",
    "torchtitan-2024-compile": "torchtitan-2024",
    "torchtitan-2024-compile-rowwise": "torchtitan-2024",
}


def generation_of(software: str) -> str:
    return _ONE_GENERATION.get(software, software)


@dataclass(frozen=True)
class Efficiency:
    """The content of `efficiency.yaml`."""

    ceilings: Mapping[str, Mapping[str, float]]
    attention: Mapping[str, Mapping[str, Any]]
    attention_reach: Mapping[str, Mapping[str, float]]
    fast_exponentials: tuple[str, ...]
    constants: Mapping[str, float]
    software: Mapping[str, Software]


@cache
def shipped_efficiency() -> Efficiency:
    content = package_yaml("cumulo.plan", "data/efficiency.yaml")
    return Efficiency(
        ceilings=content["ceilings"],
        attention=content["attention"],
        attention_reach=content["attention_reach"],
        fast_exponentials=tuple(content["fast_exponentials"]),
        constants={name: float(value) for name, value in content["constants"].items()},
        software={name: software_from(name, entry) for name, entry in content["software"].items()},
    )


@cache
def left_out_efficiency(generation: str) -> Efficiency:
    """Efficiency as if a generation of software had published nothing (`fit_training.py --write`)."""
    folds = package_yaml("cumulo.plan", "data/efficiency_left_out.yaml")
    if generation not in folds:
        raise ConfigError(f"there are no constants without {generation}; there are: {', '.join(folds)}")
    return with_constants(shipped_efficiency(), folds[generation])


def with_constants(found: Efficiency, values: Mapping[str, float]) -> Efficiency:
    """Other constants; those of attention are named by generation and kernel, as in hopper/cudnn."""
    reach = {place: dict(kernels) for place, kernels in found.attention_reach.items()}
    constants = dict(found.constants)
    for name, value in values.items():
        place, slash, kernel = name.partition("/")
        if slash:
            reach[place][kernel] = value
        else:
            constants[name] = value
    return replace(found, constants=constants, attention_reach=reach)


def software_from(name: str, entry: Mapping[str, Any]) -> Software:
    known = {field.name for field in fields(Software)}
    if unknown := sorted(set(entry) - known):
        raise ConfigError(f"the software {name} has unknown traits: {', '.join(unknown)}")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    return Software(name, **values)


def composed(
    software: Software,
    generation: str,
    dtype: str,
    device: Device | None = None,
    given: Efficiency | None = None,
) -> Profile:
    """The profile of a software on a generation of devices, or on one of them, which may get more power than the
    one that its generation's ceiling was measured on."""
    found = given or shipped_efficiency()
    known, narrow = found.constants, dtype == "float8"
    place = generation if generation in found.ceilings else "other"
    ceiling = found.ceilings[place]
    power = 1.0
    if device is not None:
        watts = device.power_w / (device.flops("bfloat16") / 1e12)
        power = (watts / ceiling["watts"]) ** known["power_exponent"]
    highest = min(HIGHEST_SHARE, ceiling["bits8" if narrow else "bits16"] * power)
    share = known["product_share"] * known.get(f"product_share_{place}", 1.0)
    if narrow:
        share *= known["product_share_8bit"]
    fast = device is not None and device.name in found.fast_exponentials
    reach = found.attention_reach[place][software.attention] * min(1.25, power)
    forward, backward = found.attention[place][software.attention]
    if fast:
        reach *= known["fast_exponentials_gain"]
    passes = known[f"passes_{software.between}"]
    if narrow:
        passes *= known["passes_8bit"] * (known["passes_row_scaled"] if software.row_scaled else 1.0)
    # Stated for 8 bits: in 16, token copies are not rounded on their way.
    experts = 1.0 if narrow else 1 / known["passes_8bit"]
    if generation in software.fused_experts:
        experts *= known["fused_experts"]
    shared = {name: known[name] for name in _AS_THEY_ARE}
    return Profile(
        software=software.name,
        devices=generation if device is None else device.name,
        dtype=dtype,
        note=software.note or "physics and traits fitted to all published rows together",
        matmul_efficiency=min(highest, highest * share),
        attention_forward_efficiency=min(HIGHEST_SHARE, forward * reach),
        attention_backward_efficiency=min(HIGHEST_SHARE, backward * reach),
        attention_half_width=found.attention[place]["half_width"] * (0.5 if fast else 1.0),
        elementwise_passes=passes,
        expert_passes=known["expert_passes"] * experts,
        expert_bias_passes=known["expert_bias_passes"] * experts,
        data_rate=known["data_rate_deepspeed"] if software.deepspeed_collectives else 1.0,
        bucket_bytes=software.bucket_bytes,
        waits_for_messages=software.waits_for_messages,
        expert_imbalance=1.0,
        selective_products=software.selective_products,
        selective_attention=software.selective_attention,
        balances_stages=software.balances_stages,
        **shared,
    )


_AS_THEY_ARE = (
    "matmul_traffic", "score_bytes", "logit_bytes", "weight_bytes", "optimizer_bytes", "launch_s", "step_s",
    "tensor_exposed", "tensor_overlapped_exposed", "context_exposed", "data_exposed", "expert_launch_s",
    "chunk_launch_s", "expert_exposed", "expert_overlapped_exposed",
)  # fmt: skip
