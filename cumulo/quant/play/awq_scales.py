"""AWQ's scales in a layer: what divides the inputs of some matrices is folded into the weights before them, so the
written model needs no extra operation. Called by `quantise_layer`.

Inputs of a half-layer come from its norm, those of the last matrix of a feed-forward from `up`, and, where every
query head has its own values, those of the output projection from `v`.
"""

import torch
from torch import Tensor

from cumulo.models.attention import Attention
from cumulo.models.moe import MixtureOfExperts
from cumulo.quant.methods.awq import search_scale
from cumulo.quant.methods.grid import Grid
from cumulo.quant.play.layer import CalibratedLayer, Inputs

_READ_ATTENTION_NORM = ("attention.qkv", "attention.q", "attention.q_a", "attention.kv_a")


@torch.no_grad()
def scale_layer(layer: CalibratedLayer, sites: dict[str, Inputs], grid: Grid, group: int) -> None:
    """Change the layer's weights and what is known of their inputs; what the layer computes stays the same."""
    module = layer.module
    readers = [name for name in sites if name in _READ_ATTENTION_NORM]
    _fold_norm(layer, sites, readers, module.attention_norm.weight, grid, group)
    ffn = module.ffn
    if isinstance(ffn, MixtureOfExperts):
        readers = [name for name in sites if name.startswith(("ffn.experts.gate_up", "ffn.shared.gate_up"))]
        scale = _fold_norm(layer, sites, readers, module.ffn_norm.weight, grid, group)
        ffn.router.weight.data.mul_(scale)
    else:
        _fold_norm(layer, sites, ["ffn.gate_up"], module.ffn_norm.weight, grid, group)
    for name in [name for name in sites if ".down" in f".{name}"]:
        _fold_up(layer, sites, name, grid, group)
    attention = module.attention
    if isinstance(attention, Attention) and attention.heads == attention.kv_heads:
        inputs = sites["attention.output"]
        scale = search_scale([attention.output.weight], inputs.mean, inputs.hessian, grid, group)
        rows = attention.heads * attention.head_dim
        _divide_rows(attention.qkv.weight, attention.qkv.bias, slice(2 * rows, 3 * rows), scale)
        attention.output.weight.data.mul_(scale)
        _rescale(inputs, scale)


def _weight(layer: CalibratedLayer, site: str) -> Tensor:
    """The fused matrix that reads a site's inputs; of experts, one's."""
    parameter = layer.parameters.get(f"{site}.weight")
    if parameter is not None:
        return parameter.data
    stack, _, expert = site.rpartition(".")
    return layer.parameters[stack].data[int(expert)]


def _fold_norm(
    layer: CalibratedLayer, sites: dict[str, Inputs], readers: list[str], norm: Tensor, grid: Grid, group: int
) -> Tensor:
    """One scale for all matrices that read a norm's output, divided out of the norm's weight."""
    total = Inputs.empty(len(norm))
    seen = readers[:1] if not readers[0].startswith("ffn.experts") else readers  # others see the same tokens
    for name in seen:
        total.hessian += sites[name].hessian
        total.total += sites[name].total
        total.tokens += sites[name].tokens
    weights = [_weight(layer, name) for name in readers]
    scale = search_scale(weights, total.mean, total.hessian, grid, group)
    norm.data /= scale
    for name, weight in zip(readers, weights, strict=True):
        weight *= scale
        _rescale(sites[name], scale)
    return scale


def _fold_up(layer: CalibratedLayer, sites: dict[str, Inputs], name: str, grid: Grid, group: int) -> None:
    inputs = sites[name]
    if inputs.tokens == 0:
        return
    down, gate_up = _weight(layer, name), _weight(layer, name.replace("down", "gate_up"))
    scale = search_scale([down], inputs.mean, inputs.hessian, grid, group)
    width = down.shape[1]
    bias = layer.parameters.get(f"{name.replace('down', 'gate_up')}.bias")
    _divide_rows(gate_up, bias, slice(width, 2 * width), scale)
    down *= scale
    _rescale(inputs, scale)


def _divide_rows(weight: Tensor, bias: Tensor | None, rows: slice, scale: Tensor) -> None:
    weight.data[rows] /= scale[:, None]
    if bias is not None:
        bias.data[rows] /= scale


def _rescale(inputs: Inputs, scale: Tensor) -> None:
    inputs.hessian /= scale[:, None] * scale
    inputs.total /= scale
