"""Low-rank adapters (Hu et al. 2021): train two thin matrices beside frozen ones. Runs of one and of many processes
put them into their models, or their parts of one.

The frozen weight keeps its name, so the adapted model is the model plus parameters `lora_a` and `lora_b`; an export
adds their product to the weight, and nothing of the adapter is left to serve. A sliced matrix has its adapter
sliced alike: by rows B, by columns A, and the other one is whole on every rank.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulo.layout.pieces import adapter_shapes, is_adapter
from cumulo.models.linear import Linear
from cumulo.train.decide.config import LoraConfig
from cumulo.train.model.model import TrainingDecoder, seeded_normal


class AdaptedLinear(nn.Module):
    """y = x Wᵀ + b + (alpha / rank) · x Aᵀ Bᵀ. B begins as zero: before the first step nothing is changed."""

    __call__: Callable[..., Tensor]

    def __init__(self, linear: Linear, rank: int, scale: float) -> None:
        super().__init__()
        outputs, inputs = linear.shape
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, inputs))
        self.lora_b = nn.Parameter(linear.weight.new_empty(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self._adapted(x, F.linear(x, self.weight, self.bias))

    def without_bias(self, x: Tensor) -> Tensor:
        return self._adapted(x, F.linear(x, self.weight))

    def _adapted(self, x: Tensor, y: Tensor) -> Tensor:
        low = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return torch.add(y, low, alpha=self.scale)


def adapt(model: TrainingDecoder, config: LoraConfig, seed: int) -> None:
    """Freeze `model` and put new adapters beside its projections named in `config.targets`."""
    add_adapters(model, config)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            initialise_adapter(name, parameter, seed)


def add_adapters(model: TrainingDecoder, config: LoraConfig) -> None:
    """Freeze `model`, or a part of one, and make room for its adapters."""
    model.requires_grad_(False)
    wanted = {name.rpartition(".")[0] for name in adapter_shapes(model.spec, config.rank, config.targets)}
    for name, linear in list(model.named_modules()):
        if name in wanted and isinstance(linear, Linear):
            path, _, last = name.rpartition(".")
            adapted = AdaptedLinear(linear, config.rank, config.alpha / config.rank)
            setattr(model.get_submodule(path), last, adapted)


@torch.no_grad()
def initialise_adapter(name: str, parameter: Tensor, seed: int) -> None:
    """`parameter` is whole: its numbers depend on its name and its shape."""
    if name.endswith(".lora_a"):
        parameter.copy_(seeded_normal(name, parameter, seed) / parameter.shape[1] ** 0.5)
    else:
        parameter.zero_()


@torch.no_grad()
def merged(parameters: Mapping[str, Tensor], config: LoraConfig | None) -> dict[str, Tensor]:
    """The parameters of the plain model, adapters added to the weights they stand beside."""
    found = {name: parameter.detach() for name, parameter in parameters.items() if not is_adapter(name)}
    if config is None:
        return found
    for name, lora_a in parameters.items():
        module, _, last = name.rpartition(".")
        if last == "lora_a":
            weight = found[f"{module}.weight"]
            wide = torch.promote_types(weight.dtype, torch.float32)
            product = parameters[f"{module}.lora_b"].to(wide) @ lora_a.to(wide)
            found[f"{module}.weight"] = (
                weight.to(wide).add(product, alpha=config.alpha / config.rank).to(weight)
            )
    return found
