"""The end of a round whose draws are all greedy, without logits: from each part's largest output
(linear/likeliest_linear.py) to what was drawn behind every lane, and what of its drafts a row keeps.

`sample` and `accept` (rounds.py) in one launch. Must move: two numbers of each part and lane.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cumulo.kernels.cuda.early import early
from cumulo.kernels.cuda.sampling.rounds import RoundRows, kept_by_row
from cumulo.kernels.cuda.sampling.sample import COLUMNS, POSITION

_WORDS = ["lane_slots", "lane_starts", "query_starts", "draws"]


@triton.jit(do_not_specialize=["lanes"], do_not_specialize_on_alignment=_WORDS)
def _accept_likeliest(lane_slots, lane_starts, query_starts, draws, best, places, picked, token_ids, next_tokens,
                      tokens, row_slots, row_starts, kept_rows, one_each, turns, out, out_stride, token_stride,
                      parts, lanes, DRAFTS: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr,
                      TURNS: tl.constexpr, COLUMNS: tl.constexpr, POSITION: tl.constexpr,
                      EARLY: tl.constexpr = False):  # fmt: skip
    row = tl.program_id(0)
    first = row * (DRAFTS + 1)
    place = tl.arange(0, PLACES)
    part = tl.arange(0, PARTS)[None, :]
    inside = (place <= DRAFTS) & (first + place < lanes)
    at = (first + place)[:, None] * parts + part
    real = inside[:, None] & (part < parts)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
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
