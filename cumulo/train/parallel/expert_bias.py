"""Balance without a loss: the routers' selection biases move against the experts' load. Called after each step.

An expert that was chosen more often than the mean of its layer becomes a little less attractive, one that was
chosen less often a little more (Wang et al. 2024; DeepSeek-V3, section 2.1.2). Loads are those of the whole batch,
so that all ranks move their copies alike.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cumulo.layout.layout import Axis
from cumulo.ranks.collectives import all_reduce
from cumulo.ranks.groups import Groups
from cumulo.train.model.model import TrainingDecoder


def steer_selection_biases(models: Sequence[TrainingDecoder], rate: float, groups: Groups | None) -> None:
    """`models`: this rank's chunks, whose loads since the last time are used up; `groups`: None in one process."""
    moe = models[0].spec.moe
    if moe is not None and moe.selection_bias:
        move_biases(models, rate, take_loads(models, groups))


def take_loads(models: Sequence[TrainingDecoder], groups: Groups | None) -> Tensor:
    """How often each expert was chosen since the last time, by all ranks' tokens: [layers, experts]."""
    spec = models[0].spec
    experts = 0 if spec.moe is None else spec.moe.experts
    device = next(models[0].parameters()).device
    loads = torch.zeros(spec.layers, experts, dtype=torch.float64, device=device)
    for model in models:
        for layer, load in model.take_loads().items():
            loads[layer] += load
    # Stages too: in a bidirectional pipeline two of them have the same layers and other micro-batches.
    axes: tuple[Axis, ...] = ("pp", "dp")
    for axis in axes:
        if groups is not None:
            all_reduce(loads, groups.group_of_several(axis))
    return loads


@torch.no_grad()
def move_biases(models: Sequence[TrainingDecoder], rate: float, loads: Tensor) -> None:
    steps = rate * (loads.mean(1, keepdim=True) - loads).sign()
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("selection_bias"):
                parameter.add_(steps[int(name.split(".")[1])])
