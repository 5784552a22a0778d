"""Which experts a token goes to, and the order in which the grouped products take the choices. `moe.mixture` calls
it.

Must move: the logits in, and a few words a choice out; it is about launches, not about bytes. Nothing here waits
for the host: how many choices an expert got is read by the kernels.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.spec.model import MoESpec

_SORT_CHUNK = 4096


def route_reference(
    x: Tensor, router: Tensor, moe: MoESpec, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), router.to(wide))
    scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
    preference = scores if bias is None else scores + bias
    if moe.groups > 1:
        grouped = preference.view(len(x), moe.groups, -1)
        strength = grouped.topk(1 if moe.group_score == "max" else 2, -1).values.sum(-1)
        kept = torch.zeros_like(strength).scatter_(-1, strength.topk(moe.top_groups, -1).indices, 1.0) > 0
        preference = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    chosen = preference.topk(moe.experts_per_token, -1).indices
    weights = scores.gather(-1, chosen)
    if moe.normalise_weights:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.routed_scale, chosen


# -- who goes where -------------------------------------------------------------------------------------------


@triton.jit
def _in_best_groups(preference, expert, group_size, E: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr,
                    TWO: tl.constexpr, PADDED_GROUPS: tl.constexpr):  # fmt: skip
    """Which experts are in the TOP groups with the best expert, or with TWO the best pair (DeepSeek-V3, 2.1.2)."""
    group = expert // group_size
    place = tl.arange(0, PADDED_GROUPS)
    strength = tl.full((PADDED_GROUPS,), float("-inf"), tl.float32)
    for index in tl.static_range(GROUPS):
        own = tl.where(group == index, preference, float("-inf"))
        best = tl.max(own, 0)
        if TWO:
            first = tl.min(tl.where(own == best, expert, E), 0)
            best += tl.max(tl.where(expert == first, float("-inf"), own), 0)
        strength = tl.where(place == index, best, strength)
    kept = expert < 0
    for _ in tl.static_range(TOP):
        winner = tl.min(tl.where(strength == tl.max(strength, 0), place, PADDED_GROUPS), 0)
        kept = kept | (group == winner)
        strength = tl.where(place == winner, float("-inf"), strength)
    return kept


@triton.jit
def _route(logits, bias, chosen, weights, experts, scale, first, own, K: tl.constexpr, E: tl.constexpr,
           SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr, BIASED: tl.constexpr, PADDED_K: tl.constexpr,
           GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BY_TWO: tl.constexpr,
           PADDED_GROUPS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E)
    inside = expert < experts
    x = tl.load(logits + token * experts + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        e = tl.exp(x - tl.max(x, 0))
        score = e / tl.sum(e, 0)
    else:
        score = tl.sigmoid(x)
    preference = score
    if BIASED:
        preference += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    preference = tl.where(inside, preference, float("-inf"))
    if GROUPS > 1:
        kept = _in_best_groups(
            preference, expert, experts // GROUPS, E, GROUPS, TOP_GROUPS, BY_TWO, PADDED_GROUPS
        )
        preference = tl.where(kept, preference, float("-inf"))
    place = tl.arange(0, PADDED_K)
    picked = tl.zeros((PADDED_K,), tl.int32)
    held = tl.zeros((PADDED_K,), tl.float32)
    for index in tl.static_range(K):
        best = tl.max(preference, 0)
        winner = tl.min(tl.where(preference == best, expert, E), 0)  # of equals the lowest
        winner = tl.minimum(winner, experts - 1)  # NaN equals nothing; the place must exist all the same
        picked = tl.where(place == index, winner, picked)
        held = tl.where(place == index, tl.sum(tl.where(expert == winner, score, 0.0), 0), held)
        preference = tl.where(expert == winner, float("-inf"), preference)
    if NORMALISE:
        held = held / (tl.sum(held, 0) + 1e-20)
    here = (picked >= first) & (picked < first + own)
    tl.store(chosen + token * K + place, tl.where(here, picked - first, -1), mask=place < K)
    tl.store(weights + token * K + place, held * scale, mask=place < K)


@triton.jit
def _count(chosen, counts, choices, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros((), tl.int32)
    for first in range(0, choices, CHUNK):
        index = first + tl.arange(0, CHUNK)
        mine = tl.load(chosen + index, mask=index < choices, other=-1) == expert
        total += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, total)


@triton.jit
def _sort(chosen, counts, order, tile_experts, choices, experts, tiles, TILE: tl.constexpr, E: tl.constexpr,
          CHUNK: tl.constexpr):  # fmt: skip
    """Stable, so that results repeat bit for bit. Each expert's choices begin at a multiple of TILE."""
    expert = tl.program_id(0)
    every = tl.arange(0, E)
    count = tl.load(counts + every, mask=every < experts, other=0)
    padded = (count + TILE - 1) // TILE
    begin = tl.sum(tl.where(every < expert, padded, 0), 0)
    own = tl.sum(tl.where(every == expert, padded, 0), 0)
    lane = tl.arange(0, CHUNK)
    for first in range(0, own, CHUNK):
        tl.store(
            tile_experts + begin + first + lane,
            tl.zeros((CHUNK,), tl.int32) + expert,
            mask=first + lane < own,
        )
    if expert == experts - 1:  # tiles that no expert needs
        used = begin + own
        for first in range(used, tiles, CHUNK):
            tl.store(tile_experts + first + lane, tl.full((CHUNK,), -1, tl.int32), mask=first + lane < tiles)
    rank = tl.zeros((), tl.int32)
    for first in range(0, choices, CHUNK):
        index = first + lane
        mine = (tl.load(chosen + index, mask=index < choices, other=-1) == expert).to(tl.int32)
        place = begin * TILE + rank + tl.cumsum(mine, 0) - 1
        tl.store(order + place, index, mask=mine > 0)
        rank += tl.sum(mine, 0)
    # The rest of the last tile belongs to no choice.
    rest = rank + tl.arange(0, TILE)
    tl.store(order + begin * TILE + rest, tl.full((TILE,), -1, tl.int32), mask=rest < own * TILE)


def route(
    logits: Tensor, bias: Tensor | None, moe: MoESpec, chosen: Tensor, weights: Tensor, held: range
) -> None:
    """From float32 logits [T, experts] each token's experts into `chosen`, and their shares into `weights`. Experts
    are counted from the first that is held here; -1 stands for one that is not."""
    _route[(len(logits),)](
        logits, logits if bias is None else bias, chosen, weights, moe.experts, moe.routed_scale, held.start,
        len(held), K=moe.experts_per_token, E=triton.next_power_of_2(moe.experts), SOFTMAX=moe.scoring == "softmax",
        NORMALISE=moe.normalise_weights, BIASED=bias is not None,
        PADDED_K=triton.next_power_of_2(moe.experts_per_token), GROUPS=moe.groups, TOP_GROUPS=moe.top_groups,
        BY_TWO=moe.group_score == "top2sum", PADDED_GROUPS=triton.next_power_of_2(moe.groups), num_warps=1,
    )  # fmt: skip


def sort_by_expert(
    chosen: Tensor, counts: Tensor, order: Tensor, tile_experts: Tensor, choices: int, experts: int, tiles: int,
    rows: int,
) -> None:  # fmt: skip
    """The choices by expert, in tiles of `rows` of one expert each: `order` has them, `tile_experts` whose,
    -1 for no one's."""
    _count[(experts,)](chosen, counts, choices, CHUNK=_SORT_CHUNK, num_warps=8)
    _sort[(experts,)](
        chosen, counts, order, tile_experts, choices, experts, tiles, TILE=rows,
        E=triton.next_power_of_2(experts), CHUNK=_SORT_CHUNK, num_warps=8,
    )  # fmt: skip
