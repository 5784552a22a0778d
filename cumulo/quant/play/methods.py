"""A layer's matrices by a recipe: which inputs are looked at, in which order, and what each method makes of them.
Called by the run once per layer; the layer's own weights become what a reader of the result will see.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cumulo.models.attention import Attention
from cumulo.models.files.quantised.matrices import QuantisedMatrix
from cumulo.models.moe import MixtureOfExperts
from cumulo.quant.decide.recipe import Recipe
from cumulo.quant.play.layer import CalibratedLayer, Inputs
from cumulo.quant.rounding import (
    LARGEST,
    Grid,
    float8,
    gptq,
    round_to_nearest,
    search_clipping,
    search_scale,
)

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


Matrices = dict[str, QuantisedMatrix]  # by module
Tell = Callable[[str], None]
# Beginnings of sites in the order of computation: what comes later sees the rounding of what came before.
_STAGES = (
    ("attention.qkv", "attention.q", "attention.q_a", "attention.kv_a"),
    ("attention.q_b",),
    ("attention.output",),
    ("ffn.gate_up", "ffn.experts.gate_up", "ffn.shared.gate_up"),
    ("ffn.down", "ffn.experts.down", "ffn.shared.down"),
)


def quantise_layer(
    layer: CalibratedLayer, recipe: Recipe, hidden: Tensor | None, stored: torch.dtype, tell: Tell
) -> Matrices:
    """`hidden`: the layer's inputs on the calibration text, for recipes that need them; `stored`: the type of the
    scales. GPTQ takes the Hessians of a stage after the stages before it were rounded (Frantar's "true
    sequential"); AWQ moves scales between matrices, so it sees all inputs first."""
    grid = Grid(recipe.bits, bool(recipe.symmetric), stored)
    found: Matrices = {}
    for stage in _STAGES if recipe.method == "gptq" else (None,):
        sites = _sites(layer, stage) if recipe.needs_calibration else {}
        if sites:
            assert hidden is not None
            tell("inputs" if stage is None else f"inputs of {stage[0]}")
            with layer.watching(sites, stop_after=None if stage is None else list(sites)[-1]):
                layer.run(hidden)
        if recipe.method == "awq":
            tell("scales")
            scale_layer(layer, sites, grid, recipe.group or 0)
        for module, placement in layer.matrices():
            inputs = sites.get(layer.site(placement))
            if stage is not None and inputs is None:
                continue
            tell(module)
            weight = layer.weight(placement)
            found[module] = _quantised(module, weight, recipe, grid, inputs)
            weight.copy_(found[module].dequantise())
    return found


def _quantised(
    module: str, weight: Tensor, recipe: Recipe, grid: Grid, inputs: Inputs | None
) -> QuantisedMatrix:
    if recipe.method == "fp8":
        scale = None if inputs is None else torch.tensor(max(inputs.largest, 1e-12) / LARGEST)
        return float8(weight, recipe.scheme, scale)
    group = recipe.group or weight.shape[1]
    if inputs is None or inputs.tokens == 0:  # or an expert that the calibration text never reached
        return round_to_nearest(weight, grid, group)
    if recipe.method == "gptq":
        return gptq(weight, inputs.hessian, grid, group, recipe.act_order, recipe.damping)
    # Clipping queries and keys would change attention more than their own outputs say (AutoAWQ).
    clips = not module.endswith(("q_proj", "k_proj"))
    scales = search_clipping(weight, inputs.hessian, grid, group) if clips else None
    return round_to_nearest(weight, grid, group, scales)


def _sites(layer: CalibratedLayer, beginnings: tuple[str, ...] | None = None) -> dict[str, Inputs]:
    found: dict[str, Inputs] = {}
    for _, placement in layer.matrices():
        name = placement.target.removesuffix(".weight")
        if beginnings is None or name in beginnings:
            site = layer.site(placement)
            if site not in found:
                found[site] = Inputs.empty(placement.shape[1])
    return found
