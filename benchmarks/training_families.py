"""What `fit_training.py` fits: the constants of each family of profiles, and what each is drawn to."""

from collections.abc import Mapping
from dataclasses import dataclass

# constant: (prior, how many times off it may easily be)
PRIORS: dict[str, tuple[float, float]] = {
    "matmul_efficiency": (0.7, 1.25),
    "matmul_traffic": (0.3, 2.0),
    "attention_forward_efficiency": (0.4, 1.6),
    "attention_backward_efficiency": (0.35, 1.6),
    "elementwise_passes": (1.8, 1.6),
    "logit_bytes": (20.0, 1.6),
    "weight_bytes": (10.0, 1.6),
    "optimizer_bytes": (40.0, 1.6),
    "launch_s": (1.5e-4, 2.0),
    "step_s": (0.02, 2.0),
    "tensor_exposed": (1.0, 1.4),
    "tensor_overlapped_exposed": (0.5, 1.6),
    "context_exposed": (0.3, 2.0),
    "data_exposed": (0.2, 1.6),
    "data_rate": (1.0, 3.0),
    "expert_passes": (16.0, 2.0),
    "expert_bias_passes": (2.0, 2.0),
    "expert_exposed": (1.0, 1.5),
    "expert_overlapped_exposed": (0.5, 1.6),
    "expert_launch_s": (1e-4, 3.0),
    "chunk_launch_s": (1e-4, 5.0),
}
# What no device reaches, whatever the rows say.
LIMITS = {
    "matmul_efficiency": 0.92,
    "attention_forward_efficiency": 0.8,
    "attention_backward_efficiency": 0.8,
}
# Backward's attention follows forward's by a fixed ratio where rows cannot tell them apart.
TIED = {"attention_forward_efficiency": ("attention_backward_efficiency", 0.85)}


@dataclass(frozen=True)
class Family:
    """Profiles that are fitted together: constants they share (the first has them, and the others are based on it),
    and constants of their own."""

    shared: tuple[str, ...]
    own: Mapping[str, tuple[str, ...]]

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """(profile, constant); shared ones under the first profile's name."""
        first = next(iter(self.own))
        return [(first, name) for name in self.shared] + [
            (profile, name) for profile, names in self.own.items() for name in names
        ]


PRODUCTS = ("matmul_efficiency",)
OWN = (*PRODUCTS, "elementwise_passes")
DEVICE = ("attention_forward_efficiency", "logit_bytes", "launch_s")  # what rows of one kind of layout tell
WAITS = ("tensor_overlapped_exposed", "data_exposed")
EXCHANGE = ("expert_passes", "expert_bias_passes", "expert_exposed", "expert_overlapped_exposed")
HOST = ("expert_launch_s", "chunk_launch_s")  # of mixtures whose host waits
FSDP = (
    *DEVICE, "attention_backward_efficiency", "matmul_traffic", "weight_bytes", "optimizer_bytes", "step_s",
    "data_exposed",
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "fsdp-2023-ampere": Family(FSDP, {"fsdp-2023-ampere": OWN, "fsdp-2023-a100-40gb": OWN}),
    "fsdp-2023-hopper": Family(FSDP, {"fsdp-2023-hopper": OWN, "fsdp-2023-hopper-fp8": OWN}),
    "megatron-2021": Family(
        ("matmul_traffic", "attention_forward_efficiency", "launch_s", "tensor_exposed"),
        {"megatron-2021-ampere": OWN},
    ),
    "deepspeed-2021": Family((), {"deepspeed-2021-ampere": ("data_exposed", "data_rate")}),
    "megatron-core-2024": Family(
        (*DEVICE, *WAITS), {"megatron-core-2024-hopper": OWN, "megatron-core-2024-hopper-fp8": OWN}
    ),
    "megatron-bridge-2025": Family(
        ("launch_s", *WAITS, *EXCHANGE, *HOST),
        {
            "megatron-bridge-2025-hopper-fp8": OWN,
            "megatron-bridge-2025-hopper": (),
            "megatron-bridge-2025-blackwell-fp8": (*DEVICE, *WAITS, *OWN, "expert_bias_passes"),
            "megatron-bridge-2025-blackwell": OWN,
            "megatron-bridge-2025-gb200-fp8": PRODUCTS,
            "megatron-bridge-2025-gb200": (),
            "megatron-bridge-2025-b300-fp8": (*PRODUCTS, "attention_forward_efficiency"),
            "megatron-bridge-2025-b300": OWN,
            "megatron-bridge-2025-gb300-fp8": PRODUCTS,
            "megatron-bridge-2025-gb300": (),
        },
    ),
    "megatron-bridge-2026": Family(
        (),
        {
            "megatron-bridge-2026-gb200-fp8": ("expert_passes", "expert_bias_passes", *PRODUCTS),
            "megatron-bridge-2026-gb300-fp8": (*PRODUCTS, "attention_forward_efficiency"),
            "megatron-bridge-2026-hopper-fp8": (),
        },
    ),
    "torchtitan-2024": Family(
        ("attention_forward_efficiency", "tensor_exposed", "context_exposed", *WAITS),
        {
            "torchtitan-2024-compile-hopper": OWN,
            "torchtitan-2024-hopper": ("elementwise_passes",),
            "torchtitan-2024-compile-hopper-fp8": OWN,
            "torchtitan-2024-compile-rowwise-hopper-fp8": ("elementwise_passes",),
            "torchtitan-2024-compile-h200-fp8": PRODUCTS,
        },
    ),
    "nanotron-2025": Family(("launch_s", "data_rate", "step_s", *WAITS), {"nanotron-2025-hopper": OWN}),
}
