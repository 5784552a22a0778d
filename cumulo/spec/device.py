"""Device and Node: what computes, as numbers. The catalogue makes them; planner, simulators and reports read them.

Rates are peaks as the maker prints them, dense (without structured sparsity), in FLOP/s and bytes/s; what is
reached of them is the cost model's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cumulo.errors import ConfigError, require_least

# Where a device has no rate for a number format, it computes in the next wider one that it has.
_WIDER = {
    "float4": "float8",
    "float8": "bfloat16",
    "int8": "bfloat16",
    "bfloat16": "float32",
    "float16": "bfloat16",
    "tfloat32": "float32",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or one CPU socket)."""

    name: str
    generation: (
        str  # "ampere", "hopper", "blackwell", "ada", "cdna3", "cpu": what efficiency curves belong to
    )
    year: int
    peak_flops: Mapping[str, float] = field(hash=False)  # FLOP/s by number format
    memory_bytes: int  # what the driver offers
    memory_bytes_per_s: float
    link_kind: str  # scale-up: "nvlink4", "infinity-fabric", "pcie4", ...
    link_bytes_per_s: float  # over all its scale-up links together, each way
    host_bytes_per_s: float  # to the host's memory (PCIe, NVLink-C2C), each way
    processors: int  # streaming multiprocessors, compute units or cores: what a matrix's tiles are dealt to
    power_w: float  # at full load
    price_per_hour: float  # USD to rent one, with its share of the node; a guide of 2025, to be overridden
    source: str

    def __post_init__(self) -> None:
        require_least(
            self, 0, "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "host_bytes_per_s", "processors",
            above=True, of=f"device {self.name}: ",
        )  # fmt: skip
        require_least(self, 0, "power_w", "price_per_hour", of=f"device {self.name}: ")
        if "float32" not in self.peak_flops:
            raise ConfigError(
                f"device {self.name}: peak_flops must name float32, the format every device has"
            )
        for dtype, rate in self.peak_flops.items():
            if not rate > 0:
                raise ConfigError(
                    f"device {self.name}: peak_flops of {dtype} must be more than 0, got {rate}"
                )

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s for matrices of `dtype`; of the next wider format where the device does not have it."""
        known = dtype
        while known not in self.peak_flops:
            if known not in _WIDER:
                formats = ", ".join(self.peak_flops)
                raise ConfigError(f"device {self.name} has no rate for {dtype!r}; it has: {formats}")
            known = _WIDER[known]
        return self.peak_flops[known]


@dataclass(frozen=True, slots=True)
class Node:
    """A server: devices joined by scale-up links, each with its share of the network cards."""

    name: str
    device: Device
    gpus: int
    nic_bytes_per_s: float  # of the network, for each GPU, each way
    # GPUs that the scale-up links reach: those of the node, or of a whole rack (72 in an NVL72).
    scale_up_gpus: int
    power_w: float  # of everything in the node but the devices: CPUs, memory, cards, fans

    def __post_init__(self) -> None:
        require_least(
            self, 0, "gpus", "nic_bytes_per_s", "scale_up_gpus", above=True, of=f"node {self.name}: "
        )
        if self.scale_up_gpus % self.gpus and self.gpus % self.scale_up_gpus:
            raise ConfigError(
                f"node {self.name}: a scale-up domain of {self.scale_up_gpus} GPUs cannot be made of nodes of "
                f"{self.gpus}; give a multiple or a divisor of {self.gpus}"
            )
