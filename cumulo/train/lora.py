"""Low-rank adapters (Hu et al. 2021): train two thin matrices beside frozen ones. The trainer applies them.

The frozen weight keeps its name, so the adapted model is the model plus parameters `lora_a` and `lora_b`; an export
adds their product to the weight, and nothing of the adapter is left to serve.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulo.errors import ConfigError
from cumulo.models.linear import Linear
from cumulo.train import strict
from cumulo.train.config import LoraConfig
from cumulo.train.initialise import seeded_normal


class AdaptedLinear(nn.Module):
    """y = x Wᵀ + b + (alpha / rank) · x Aᵀ Bᵀ. B begins as zero: before the first step nothing is changed."""

    __call__: Callable[..., Tensor]

    def __init__(self, linear: Linear, rank: int, scale: float) -> None:
        super().__init__()
        outputs, inputs = linear.shape
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, inputs))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return torch.add(F.linear(x, self.weight, self.bias), low, alpha=self.scale)


def adapt(model: nn.Module, config: LoraConfig, seed: int) -> None:
    """Freeze `model` and put adapters beside its projections named in `config.targets`."""
    model.requires_grad_(False)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    kinds = {name.rsplit(".", 1)[-1] for name in linears if name.startswith("layers.")}
    for target in config.targets:
        if target not in kinds:
            raise ConfigError(
                f"lora.targets: this model has no projection {target!r}{strict.nearest(target, sorted(kinds))}"
            )
    for name, linear in linears.items():
        path, _, last = name.rpartition(".")
        if name.startswith("layers.") and last in config.targets:
            adapted = AdaptedLinear(linear, config.rank, config.alpha / config.rank)
            with torch.no_grad():
                normal = seeded_normal(f"{name}.lora_a", adapted.lora_a, seed)
                adapted.lora_a.copy_(normal / linear.shape[1] ** 0.5)
            setattr(model.get_submodule(path), last, adapted)


@torch.no_grad()
def merged_parameters(model: nn.Module) -> Mapping[str, Tensor]:
    """The parameters of the plain model, adapters added to the weights they stand beside."""
    found: dict[str, Tensor] = {
        name: parameter.detach() for name, parameter in model.named_parameters() if ".lora_" not in name
    }
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            product = module.lora_b.float() @ module.lora_a.float() * module.scale
            found[f"{name}.weight"] = (module.weight.float() + product).to(module.weight.dtype)
    return found
