"""The experts of a few tokens: every choice of an expert is a product with one row. `moe.mixture` calls it.

Must read the weights of each chosen expert once, 6 · hidden · width bytes a choice in 16 bits, and nothing else
counts: so plain multiply-adds on rows of weights, as in `small_linear`, with enough loads on their way. The first
product leaves silu(gate) · up of each choice; the second adds up all of a token's experts in one program and goes
straight onto the residual, so there is no sum over experts left to do.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FewExpertsConfig:
    """Rows of weights and columns of them that a program holds at once, and its warps."""

    rows: int
    block_k: int
    num_warps: int


# The fastest on an H200 at Qwen3-30B-A3B's shape, for 1, 4 and 8 tokens.
UP = FewExpertsConfig(1, 1024, 2)
DOWN = FewExpertsConfig(4, 128, 2)


@triton.jit
def _weights(pointers, row_mask, k_mask, MASKED_ROWS: tl.constexpr, MASKED_K: tl.constexpr):
    """A tile of weights; each is used once, so the cache need not keep it."""
    if MASKED_ROWS or MASKED_K:
        mask = row_mask[:, None] & k_mask[None, :]
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    return tl.load(pointers, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _up(x, weight, out, chosen, width, x_stride, expert_stride, PER_TOKEN: tl.constexpr, K: tl.constexpr,
        ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_ROWS: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    choice = tl.program_id(1)
    expert = tl.load(chosen + choice).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < width
    if SPLIT:  # another rank's expert: nothing is read
        row_mask = row_mask & (row * 0 + expert >= 0)
    gate_rows = weight + expert * expert_stride + row.to(tl.int64)[:, None] * K
    up_rows = gate_rows + width.to(tl.int64) * K
    x += (choice // PER_TOKEN).to(tl.int64) * x_stride
    k = tl.arange(0, BLOCK_K)
    MASKED: tl.constexpr = SPLIT or not EVEN_ROWS
    gate_sum = tl.zeros((ROWS, BLOCK_K), tl.float32)
    up_sum = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for at in tl.static_range(0, K, BLOCK_K):
        inside = at + k < K
        gate = _weights(gate_rows + at + k[None, :], row_mask, inside, MASKED, at + BLOCK_K > K)
        up = _weights(up_rows + at + k[None, :], row_mask, inside, MASKED, at + BLOCK_K > K)
        token = tl.load(x + at + k, mask=inside, other=0.0).to(tl.float32)
        gate_sum += gate * token[None, :]
        up_sum += up * token[None, :]
    # rounded where the separate product would round
    gates = tl.sum(gate_sum, 1).to(out.dtype.element_ty).to(tl.float32)
    ups = tl.sum(up_sum, 1).to(out.dtype.element_ty).to(tl.float32)
    activated = gates * tl.sigmoid(gates) * ups
    tl.store(out + choice.to(tl.int64) * width + row, activated.to(out.dtype.element_ty), mask=row_mask)


@triton.jit
def _down(activated, weight, residual, weights, chosen, hidden, expert_stride, PER_TOKEN: tl.constexpr,
          K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_ROWS: tl.constexpr,
          SPLIT: tl.constexpr):  # fmt: skip
    MASKED: tl.constexpr = SPLIT or not EVEN_ROWS
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < hidden
    k = tl.arange(0, BLOCK_K)
    place = residual + token * hidden + row
    before = tl.load(place, mask=row_mask, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for index in tl.static_range(PER_TOKEN):
        choice = token * PER_TOKEN + index
        expert = tl.load(chosen + choice).to(tl.int64)
        share = tl.load(weights + choice)
        here = row_mask
        if SPLIT:
            here = row_mask & (row * 0 + expert >= 0)
        rows = weight + expert * expert_stride + row.to(tl.int64)[:, None] * K
        own = tl.zeros((ROWS, BLOCK_K), tl.float32)
        for at in tl.static_range(0, K, BLOCK_K):
            inside = at + k < K
            tile = _weights(rows + at + k[None, :], here, inside, MASKED, at + BLOCK_K > K)
            # As wide as the tile, so that every thread loads what it multiplies: no exchange between threads.
            places = tl.broadcast_to((activated + choice * K + at + k)[None, :], (ROWS, BLOCK_K))
            wanted = inside[None, :]
            if SPLIT:
                wanted = wanted & here[:, None]
            part = tl.load(places, mask=wanted, other=0.0).to(tl.float32)
            own += tile * part
        total += share * own
    y = before + tl.sum(total, 1)
    tl.store(place, y.to(residual.dtype.element_ty), mask=row_mask)


def down_config(width: int, per_token: int) -> FewExpertsConfig:
    """Loops are unrolled: wide experts (Mixtral's) and many of them (DeepSeek's) take wider tiles, or the code
    would be long and its registers not enough."""
    config = DOWN
    while per_token * width > 48 * config.block_k:
        config = FewExpertsConfig(config.rows, 2 * config.block_k, min(8, 2 * config.num_warps))
    return config


def experts_of_few(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    activated: Tensor,
    residual: Tensor,
    configs: tuple[FewExpertsConfig, FewExpertsConfig] | None = None,
    split: bool = False,
) -> None:
    """residual [T, hidden] += each token's experts. x [T, hidden]; gate_up [E, 2F, hidden]; down [E, hidden, F];
    `chosen` and `weights` [T · experts a token] say which and how much; `activated` [T · experts a token, F].
    `split`: other ranks hold other experts, and -1 is chosen for those."""
    tokens, hidden = x.shape
    width = down.shape[2]
    per_token = len(chosen) // tokens
    first, second = configs or (UP, down_config(width, per_token))
    block = min(first.block_k, triton.next_power_of_2(hidden))
    _up[(triton.cdiv(width, first.rows), tokens * per_token)](
        x, gate_up, activated, chosen, width, x.stride(0), gate_up.stride(0), PER_TOKEN=per_token, K=hidden,
        ROWS=first.rows, BLOCK_K=block, EVEN_ROWS=width % first.rows == 0, SPLIT=split, num_warps=first.num_warps,
    )  # fmt: skip
    block = min(second.block_k, triton.next_power_of_2(width))
    _down[(triton.cdiv(hidden, second.rows), tokens)](
        activated, down, residual, weights, chosen, hidden, down.stride(0), PER_TOKEN=per_token, K=width,
        ROWS=second.rows, BLOCK_K=block, EVEN_ROWS=hidden % second.rows == 0, SPLIT=split,
        num_warps=second.num_warps,
    )  # fmt: skip
