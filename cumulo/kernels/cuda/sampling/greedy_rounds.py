"""Greedy draws of a round without logits, for one to eight rows: of norm(x)·Wᵀ only the largest output of each
part of W's rows, and from these to what was drawn behind every lane, and what of its drafts a row keeps. The
proposals of a draft head need no more, too.

`likeliest_tiles` must move the weights once, 2·N·K bytes. A program has some rows of W over all of k on its way
before the kernel ahead has ended, as plain loads: k is cut into two powers of two (576 = 512 + 64), so nothing of a
tile is empty. As in skinny_linear the product is turned around: a tile of W is the tall operand, the rows of x are
eight columns. Outputs are rounded as logits would be, so that of equal logits the first is found, as a draw from
logits does. `accept_likeliest` is `sample` and `accept` (rounds.py) in one launch; it moves two numbers of each
part and lane.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.early import early, wait_for_kernel_ahead
from cumulo.kernels.cuda.sampling.rounds import RoundRows, kept_by_row
from cumulo.kernels.cuda.sampling.sample import COLUMNS, POSITION

MOST_TILED = 8
MOST_COLUMNS = 1024  # with more, a program's part of W does not fit its registers


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Rows of W that a program takes, and its warps."""

    rows: int
    num_warps: int


DEFAULT = TileConfig(64, 4)


def fits_tiles(rows: int, hidden: int) -> bool:
    return rows <= MOST_TILED and 16 <= hidden <= MOST_COLUMNS


def tile_parts(outputs: int, config: TileConfig = DEFAULT) -> int:
    """How many programs share a matrix of so many rows."""
    return -(-outputs // config.rows)


@triton.jit
def _tiles(x, weight, norm_weight, best, place, OUTPUTS, stride_x, stride_weight, stride_best, eps,
           M: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, MAIN: tl.constexpr,
           REST: tl.constexpr, EARLY: tl.constexpr = 0):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    safe = tl.minimum(row, OUTPUTS - 1).to(tl.int64)
    line = tl.arange(0, BLOCK_M)
    lines = tl.minimum(line, M - 1)[:, None] * stride_x
    column = tl.arange(0, MAIN)[None, :]
    w = tl.load(weight + safe[:, None] * stride_weight + column)
    gains = tl.load(norm_weight + column)
    w_rest, more, more_gains = w, column, gains
    if REST > 0:
        more = MAIN + tl.arange(0, REST)[None, :]
        w_rest = tl.load(weight + safe[:, None] * stride_weight + more, mask=more < K, other=0.0)
        more_gains = tl.load(norm_weight + more, mask=more < K, other=0.0)
    wait_for_kernel_ahead(EARLY)
    values = tl.load(x + lines + column).to(tl.float32)
    squares = tl.sum(values * values, 1)
    rest = values
    if REST > 0:
        rest = tl.load(x + lines + more, mask=more < K, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    rstd = tl.rsqrt(squares / K + eps)[:, None]
    kind = weight.dtype.element_ty
    normed = (values * rstd * gains.to(tl.float32)).to(kind)
    y = tl.dot(w, tl.trans(normed), input_precision="ieee")
    if REST > 0:
        normed_rest = (rest * rstd * more_gains.to(tl.float32)).to(kind)
        y = tl.dot(w_rest, tl.trans(normed_rest), y, input_precision="ieee")
    y = y.to(kind).to(tl.float32)
    peak = tl.max(y, 0)
    found = tl.min(tl.where(y == peak[None, :], safe.to(tl.int32)[:, None], OUTPUTS - 1), 0)
    at = line * stride_best + tl.program_id(0)
    # A NaN anywhere is told: a maximum passes over it.
    sick = tl.sum(tl.where(y == y, 0, 1), 0) > 0
    tl.store(best + at, tl.where(sick, float("nan"), peak), mask=line < M)
    tl.store(place + at, found, mask=line < M)


def likeliest_tiles(
    x: Tensor, weight: Tensor, norm: Tensor, eps: float, best: Tensor, place: Tensor, config: TileConfig = DEFAULT
) -> None:  # fmt: skip
    """Of norm(x) · weightᵀ each part's largest output, into best [M, parts] float32 (NaN where some output is), and
    its row of the matrix, into place [M, parts] int32; of equals the first."""
    m, k = x.shape
    main = 1 << (k.bit_length() - 1)
    rest = 0 if k == main else max(16, triton.next_power_of_2(k - main))
    _tiles[(tile_parts(weight.shape[0], config),)](
        x, weight, norm, best, place, weight.shape[0], x.stride(0), weight.stride(0), best.stride(0), eps,
        M=m, K=k, BLOCK_M=MOST_TILED, ROWS=config.rows, MAIN=main, REST=rest,
        num_warps=config.num_warps, **early(True, x),
    )  # fmt: skip


_WORDS = ["lane_slots", "lane_starts", "query_starts", "draws"]


@triton.jit(do_not_specialize=["lanes"], do_not_specialize_on_alignment=_WORDS)
def _accept_likeliest(lane_slots, lane_starts, query_starts, draws, best, places, picked, token_ids, next_tokens,
                      tokens, row_slots, row_starts, kept_rows, one_each, turns, out, out_stride, token_stride,
                      parts, lanes, DRAFTS: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr,
                      TURNS: tl.constexpr, COLUMNS: tl.constexpr, POSITION: tl.constexpr,
                      EARLY: tl.constexpr = 0):  # fmt: skip
    row = tl.program_id(0)
    first = row * (DRAFTS + 1)
    place = tl.arange(0, PLACES)
    part = tl.arange(0, PARTS)[None, :]
    inside = (place <= DRAFTS) & (first + place < lanes)
    at = (first + place)[:, None] * parts + part
    real = inside[:, None] & (part < parts)
    wait_for_kernel_ahead(EARLY)
    # Asked for before it is known whether the row is there: one wait for memory less.
    value = tl.load(best + at, mask=real, other=float("-inf"))
    where = tl.load(places + at, mask=real, other=2147483647)
    position = tl.load(draws + (first + place) * COLUMNS + POSITION, mask=inside, other=0)
    slot = tl.load(lane_slots + first, mask=first < lanes, other=-1)
    tl.store(one_each + row + 1, tl.minimum(row + 1, tl.load(query_starts + lanes) // (DRAFTS + 1)))
    tl.store(row_slots + row, slot)
    if slot < 0:
        tl.store(kept_rows + row, 0)
    else:
        peak = tl.max(value, 1)
        sick = tl.sum(tl.where(value == value, 0, 1), 1) > 0
        chosen = tl.min(tl.where(value == peak[:, None], where, 2147483647), 1)
        sound = inside & (~sick) & (peak > float("-inf")) & (peak < float("inf"))
        drawn = tl.where(sound, chosen, -1)  # -1: the host turns this into the request's error
        tl.store(picked + first + place, drawn, mask=inside)
        tl.store(tokens + slot.to(tl.int64) * token_stride + position, tl.maximum(drawn, 0), mask=inside)
        kept_by_row(row, first, slot, place, drawn, lane_starts, draws, token_ids, next_tokens, row_starts,
                    kept_rows, turns, out, out_stride, DRAFTS, PLACES, TURNS, COLUMNS, POSITION)  # fmt: skip


def accept_likeliest(
    lane_slots: Tensor, lane_starts: Tensor, query_starts: Tensor, draws: Tensor, best: Tensor, places: Tensor,
    picked: Tensor, token_ids: Tensor, next_tokens: Tensor, tokens: Tensor, rows: RoundRows, drafts: int,
) -> None:  # fmt: skip
    """`accept` where `picked` [lanes] is not drawn yet: it becomes the token of each lane's largest `best` [lanes,
    parts], by `places` (-1: not finite), and is entered into tokens[slot, position]."""
    lanes, parts = best.shape
    _accept_likeliest[(len(rows.slots),)](
        lane_slots, lane_starts, query_starts, draws, best, places, picked, token_ids, next_tokens, tokens,
        rows.slots, rows.starts, rows.kept, rows.one_each, rows.turns, rows.told, rows.told.stride(0),
        tokens.stride(0), parts, lanes, DRAFTS=drafts, PLACES=triton.next_power_of_2(drafts + 1),
        PARTS=triton.next_power_of_2(parts), TURNS=rows.told_rounds(drafts), COLUMNS=COLUMNS, POSITION=POSITION,
        num_warps=8, **early(True, best),
    )  # fmt: skip
