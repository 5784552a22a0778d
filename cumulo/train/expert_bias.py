"""Balance without a loss: the routers' selection biases move against the experts' load. Called after each step.

An expert that was chosen more often than the mean of its layer becomes a little less attractive, one that was
chosen less often a little more (Wang et al. 2024; DeepSeek-V3, section 2.1.2). Loads are those of the whole batch,
so that all ranks move their copies alike.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from cumulo.spec.layout import Axis
from cumulo.train.groups import Groups
from cumulo.train.model import TrainingDecoder


@torch.no_grad()
def steer_selection_biases(models: Sequence[TrainingDecoder], rate: float, groups: Groups | None) -> None:
    """`models`: this rank's chunks, whose loads since the last time are used up; `groups`: None in one process."""
    spec = models[0].spec
    if spec.moe is None or not spec.moe.selection_bias:
        return
    device = next(models[0].parameters()).device
    loads = torch.zeros(spec.layers, spec.moe.experts, dtype=torch.float64, device=device)
    for model in models:
        for layer, load in model.take_loads().items():
            loads[layer] += load
    # Stages too: in a bidirectional pipeline two of them have the same layers and other micro-batches.
    axes: tuple[Axis, ...] = ("pp", "dp")
    for axis in axes:
        if groups is not None and groups.size(axis) > 1:
            dist.all_reduce(loads, group=groups.of(axis))
    steps = rate * (loads.mean(1, keepdim=True) - loads).sign()
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("selection_bias"):
                parameter.add_(steps[int(name.split(".")[1])])
