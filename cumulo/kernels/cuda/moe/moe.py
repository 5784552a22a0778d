"""A mixture of experts on the device: choose experts, sort the choices by expert, two grouped products,
weighted sum. Few choices, of many experts, are not sorted: `few` takes them one by one.

Must move: the weights of every expert that is chosen, once; computes 6 · hidden · width FLOPs per choice. Few
tokens are bound by the first, thousands by the second. Nothing here waits for the host: how many tokens an expert
got is read by the kernels, and grids are as large as the worst case, whose surplus programs end at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.collective.one_shot import add_in_pairs
from cumulo.kernels.cuda.linear.invariant_matmul import invariant_matmul
from cumulo.kernels.cuda.linear.linear import Choice, linear
from cumulo.kernels.cuda.linear.small_linear import MAX_ROWS
from cumulo.kernels.cuda.moe.few import experts_of_few
from cumulo.kernels.cuda.moe.route import route, route_reference, sort_by_expert
from cumulo.layout.equal_sums import USUAL_PARTS, parts_of
from cumulo.spec.model import MoESpec

FEW_CHOICES = 64  # so few, if half of the experts are free, seldom meet: each is a product of its own


def reference(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, moe: MoESpec, bias: Tensor | None = None
) -> Tensor:
    """Every token through its experts, one after the other: [T, hidden]."""
    weights, chosen = route_reference(x, router, moe, bias)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2)
            out[token] += weight.to(x.dtype) * F.linear(F.silu(gate) * up, down[expert])
    return out


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Tiles of a grouped product: rows are choices, columns outputs. `swapped`: the weights are the instruction's
    rows, and the choices its columns, as in `invariant_matmul`."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    swapped: bool = False


@triton.jit
def _grouped(x, weight, out, weights, order, tile_experts, tiles, columns, depth, x_stride, expert_stride,
             PER_TOKEN: tl.constexpr, SWIGLU: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
             SWAPPED: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    column_tiles = (columns + COLUMNS - 1) // COLUMNS
    # Neighbouring programs take the same few row tiles through all columns: both sides stay in the L2 cache.
    group = program // (GROUP * column_tiles)
    first = group * GROUP
    in_group = tl.minimum(tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    tile = first + within % in_group
    column_tile = within // in_group
    row = tl.arange(0, ROWS)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    choice = tl.load(order + tile * ROWS + row)
    if expert >= 0:
        live = choice >= 0
        source = tl.where(live, choice // PER_TOKEN, 0).to(tl.int64)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        x_at = x + source[:, None] * x_stride + k[None, :]
        base = weight + expert * expert_stride
        safe = tl.where(column < columns, column, 0).to(tl.int64)
        w_at = base + safe[None, :] * depth + k[:, None]
        if SWAPPED:
            acc = tl.zeros((COLUMNS, ROWS), tl.float32)
            up = tl.zeros((COLUMNS, ROWS), tl.float32)
        else:
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
            up = tl.zeros((ROWS, COLUMNS), tl.float32)
        up_at = w_at + columns * depth
        for at in range(0, depth, DEPTH):
            if EVEN:
                a = tl.load(x_at, mask=live[:, None], other=0.0)
                b = tl.load(w_at)
            else:
                a = tl.load(x_at, mask=live[:, None] & (at + k < depth)[None, :], other=0.0)
                b = tl.load(w_at, mask=(at + k < depth)[:, None], other=0.0)
            if SWAPPED:
                acc = tl.dot(tl.trans(b), tl.trans(a), acc, input_precision="ieee")
            else:
                acc = tl.dot(a, b, acc, input_precision="ieee")
            if SWIGLU:
                if EVEN:
                    c = tl.load(up_at)
                else:
                    c = tl.load(up_at, mask=(at + k < depth)[:, None], other=0.0)
                if SWAPPED:
                    up = tl.dot(tl.trans(c), tl.trans(a), up, input_precision="ieee")
                else:
                    up = tl.dot(a, c, up, input_precision="ieee")
                up_at += DEPTH
            x_at += DEPTH
            w_at += DEPTH
        if SWAPPED:
            acc, up = tl.trans(acc), tl.trans(up)
        if SWIGLU:
            # rounded where the separate product would round
            gate = acc.to(out.dtype.element_ty).to(tl.float32)
            acc = gate * tl.sigmoid(gate) * up.to(out.dtype.element_ty).to(tl.float32)
        if WEIGHTED:
            acc = acc * tl.load(weights + choice, mask=live, other=0.0)[:, None]
        target = out + tl.where(live, choice, 0).to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=live[:, None] & (column < columns)[None, :])


@triton.jit
def _combine(results, chosen, residual, size, part_experts, K: tl.constexpr, SPLIT: tl.constexpr,
             PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """PARTS: the experts' runs of `part_experts` each are added up by themselves, and these sums in pairs, as they
    are where ranks hold them."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    before = tl.load(residual + token * size + column, mask=inside, other=0.0).to(tl.float32)
    total = before
    if PARTS == 1:
        for index in tl.static_range(K):
            choice = token * K + index
            here = inside
            if SPLIT:  # another rank's expert left nothing
                here = inside & (column * 0 + tl.load(chosen + choice) >= 0)
            total += tl.load(results + choice * size + column, mask=here, other=0.0).to(tl.float32)
    else:
        one, two, four = tl.zeros_like(before), tl.zeros_like(before), tl.zeros_like(before)
        for part in tl.static_range(PARTS):
            total = tl.zeros_like(before)
            for index in tl.static_range(K):
                choice = token * K + index
                expert = tl.load(chosen + choice)
                in_part = (expert >= part * part_experts) & (expert < (part + 1) * part_experts)
                here = inside & (column * 0 + in_part.to(tl.int32) > 0)
                total += tl.load(results + choice * size + column, mask=here, other=0.0).to(tl.float32)
            total, one, two, four = add_in_pairs(total, part, one, two, four, PARTS)
        total += before
    tl.store(residual + token * size + column, total.to(residual.dtype.element_ty), mask=inside)


class MoEBuffers:
    """What `mixture` works in, for up to `max_tokens` tokens; all layers share it."""

    def __init__(
        self, moe: MoESpec, hidden: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.moe, self.hidden = moe, hidden
        choices = max_tokens * moe.experts_per_token

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.logits = torch.empty((max_tokens, moe.experts), dtype=torch.float32, device=device)
        self.weights = torch.empty(choices, dtype=torch.float32, device=device)
        self.chosen, self.counts = ints(choices), ints(moe.experts)
        widest = choices + (moe.experts + 1) * 128  # the last tile of every expert, and the grid's rounding
        self.order, self.tile_experts = ints(widest), ints(widest // 16 + 1)
        self.activated = torch.empty((choices, moe.expert_hidden), dtype=dtype, device=device)
        self.results = torch.empty((choices, hidden), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        own = (self.logits, self.weights, self.chosen, self.counts, self.order, self.tile_experts)
        return sum(tensor.nbytes for tensor in own) + self.activated.nbytes + self.results.nbytes


# By shape class, what `tune` found on this kind of device.
TUNED: dict[str, tuple[GroupedConfig, GroupedConfig]] = {}


def shape_class(choices: int, experts: int) -> str:
    """Shapes that share their tiles: by how many choices an expert gets on average."""
    return next((f"up to {most} each" for most in (8, 24, 96) if choices <= most * experts), "many each")


def use(tuned: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Take in what `tune` returned on this kind of device."""
    TUNED.update({key: (GroupedConfig(**up), GroupedConfig(**down)) for key, (up, down) in tuned.items()})


def grouped_configs(
    choices: int, experts: int, invariant: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[GroupedConfig, GroupedConfig]:
    """For gate and up with SwiGLU, and for down. Invariant ones differ in what does not bear on the bits: a cell's
    products are added up in the same steps (see `invariant_matmul`)."""
    average = choices / experts
    if invariant:
        if dtype == torch.float32 or average > 24:
            return GroupedConfig(64, 64, 64, 4, 3), GroupedConfig(64, 128, 64, 4, 3)
        rows = 16 if average <= 8 else 32
        return GroupedConfig(rows, 64, 64, 4, 5, True), GroupedConfig(rows, 128, 64, 4, 5, True)
    tuned = TUNED.get(shape_class(choices, experts))
    if tuned is not None:
        return tuned
    if average <= 8:
        return GroupedConfig(16, 32, 128, 4, 4), GroupedConfig(16, 64, 128, 4, 4)
    if average <= 24:
        return GroupedConfig(32, 64, 64, 4, 4), GroupedConfig(32, 128, 64, 4, 4)
    if average <= 96:
        return GroupedConfig(64, 64, 64, 4, 4), GroupedConfig(64, 128, 64, 4, 4)
    # Two sums of 128 x 64 fill the registers of four warps to the last.
    return GroupedConfig(128, 64, 64, 8, 4), GroupedConfig(128, 128, 64, 8, 4)


def mixture(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    buffers: MoEBuffers,
    residual: Tensor,
    bias: Tensor | None = None,
    invariant: bool = False,
    configs: tuple[GroupedConfig, GroupedConfig] | None = None,
    first_expert: int = 0,
    sum_parts: int = USUAL_PARTS,
) -> Tensor:
    """residual += the weighted sum of each token's experts. x and residual [T, hidden], gate_up [E, 2F, hidden],
    down [E, hidden, F]. `invariant`: a token's result does not depend on its step-mates. Where other ranks hold
    other experts, E are those from `first_expert` on, and the sum is theirs alone. `sum_parts`: in how many parts
    an invariant sum is added up at most."""
    tokens, hidden = x.shape
    moe = buffers.moe
    per_token, experts = moe.experts_per_token, moe.experts
    choices = tokens * per_token
    logits = _router_logits(x, router, buffers.logits[:tokens], invariant)
    held = range(first_expert, first_expert + len(down))
    split = len(held) < experts
    route(logits, bias, moe, buffers.chosen, buffers.weights, held)
    if choices <= min(FEW_CHOICES, experts // 2) and not invariant and configs is None:
        experts_of_few(
            x,
            gate_up,
            down,
            buffers.chosen[:choices],
            buffers.weights,
            buffers.activated,
            residual,
            split=split,
        )
        return residual
    up_config, down_config = configs or grouped_configs(choices, experts, invariant, x.dtype)
    rows = up_config.rows
    assert rows == down_config.rows
    tiles = min(choices, -(-choices // rows) + len(held))
    sort_by_expert(
        buffers.chosen, buffers.counts, buffers.order, buffers.tile_experts, choices, len(held), tiles, rows
    )
    _product(x, gate_up, buffers.activated, buffers, up_config, tiles, per_token, swiglu=True)
    _product(buffers.activated, down, buffers.results, buffers, down_config, tiles, 1, swiglu=False)
    block = min(1024, triton.next_power_of_2(hidden))
    parts = 1
    if invariant and experts % len(held) == 0:
        parts = parts_of(experts, experts // len(held), sum_parts)
    _combine[(tokens, triton.cdiv(hidden, block))](
        buffers.results, buffers.chosen, residual, hidden, len(held) // parts, K=per_token, SPLIT=split,
        PARTS=parts, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return residual


def _product(
    x: Tensor, weight: Tensor, out: Tensor, buffers: MoEBuffers, config: GroupedConfig, tiles: int, per_token: int,
    swiglu: bool,
) -> None:  # fmt: skip
    columns = weight.shape[1] // (2 if swiglu else 1)
    depth = weight.shape[2]
    _grouped[(tiles * triton.cdiv(columns, config.columns),)](
        x, weight, out, buffers.weights, buffers.order, buffers.tile_experts, tiles, columns, depth, x.stride(0),
        weight.stride(0), PER_TOKEN=per_token, SWIGLU=swiglu, WEIGHTED=not swiglu, EVEN=depth % config.depth == 0,
        ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth, GROUP=8, SWAPPED=config.swapped,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _router_logits(x: Tensor, router: Tensor, out: Tensor, invariant: bool) -> Tensor:
    """In float32: a near tie must not flip."""
    if len(x) <= MAX_ROWS and not invariant:
        return linear(x, router, out, choice=Choice("small"))
    if invariant:
        return invariant_matmul(x, router, out)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, router.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), router.t().float(), out=out)
