"""First weights of a new model. Called by the trainer; the same numbers in whatever order they are drawn."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from cumulo.spec.model import ModelSpec

DEVIATION = 0.02  # GPT-2 (Radford et al. 2019)


@torch.no_grad()
def initialise(parameters: Mapping[str, Tensor], spec: ModelSpec, seed: int) -> None:
    """Norms one, biases zero, matrices normal; those that write to the residual stream divided by √(2 layers)."""
    for name, parameter in parameters.items():
        if name.endswith(("bias", "selection_bias")):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            deviation = DEVIATION
            if name.endswith(("attention.output.weight", "down.weight", "experts.down")):
                deviation /= (2 * spec.layers) ** 0.5
            parameter.copy_(seeded_normal(name, parameter, seed) * deviation)


def seeded_normal(name: str, parameter: Tensor, seed: int) -> Tensor:
    # Each parameter has a generator of its own, so a device that holds only some of them draws the same numbers.
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randn(parameter.shape, generator=generator).to(parameter.device)
