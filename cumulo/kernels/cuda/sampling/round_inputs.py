"""What the model reads in a round, in one launch: tokens and where they stand, their block tables, attention's work
list, and the stream as it enters the first layer. `step_inputs`, the work list and the embedding in one, for rounds
alone: every lane is one token, and no table gains a block on the way.

Must move: the blocks of each lane's sequence, and its row of the embedding.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cumulo.kernels.cuda.early import early
from cumulo.kernels.cuda.sampling.rounds import NextInputs, no_inputs, one_token_inputs

_WORDS = ["lane_slots", "lane_starts"]


@triton.jit(do_not_specialize=["min_tiles", "items_each"], do_not_specialize_on_alignment=_WORDS)
def _round_inputs(lane_slots, lane_starts, tokens, tables, embed, token_ids, positions, kv_slots, contexts,
                  step_tables, items, stream, token_stride, table_stride, step_table_stride, embed_stride,
                  stream_stride, min_tiles, items_each, all_items, lanes, PAGE: tl.constexpr,
                  KEY_TILE: tl.constexpr, ITEMS: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr,
                  EARLY: tl.constexpr = False):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    lane = tl.program_id(0)
    slot = tl.load(lane_slots + lane).to(tl.int64)
    position = tl.load(lane_starts + lane)
    # The list may have more room than equal shares take: a step without rounds may have used it.
    surplus = lanes * items_each + lane
    if surplus < all_items:
        tl.store(items + surplus * 8 + 2, 0)
    token = tl.load(tokens + slot * token_stride + position, mask=slot >= 0, other=0)
    column = tl.arange(0, COLUMNS)
    row = tl.load(embed + token.to(tl.int64) * embed_stride + column, mask=column < HIDDEN, other=0.0)
    tl.store(token_ids + lane, token)
    if slot < 0:
        no_inputs(lane, positions, kv_slots, contexts, items, items_each, ITEMS)
    else:
        one_token_inputs(lane, position, tables + slot * table_stride, positions, kv_slots, contexts, step_tables,
                         items, step_table_stride, min_tiles, items_each, PAGE, KEY_TILE, ITEMS)  # fmt: skip
    tl.store(stream + lane * stream_stride + column, row, mask=column < HIDDEN)


def round_inputs(
    lane_slots: Tensor, lane_starts: Tensor, tokens: Tensor, tables: Tensor, block_size: int, embed: Tensor,
    inputs: NextInputs, stream: Tensor,
) -> None:  # fmt: skip
    """`inputs` of all lanes (slot -1: none), and their rows of `embed` in `stream` [lanes, hidden]."""
    lanes, hidden = stream.shape
    each = len(inputs.items) // lanes
    _round_inputs[(lanes,)](
        lane_slots, lane_starts, tokens, tables, embed, inputs.tokens, inputs.positions, inputs.kv_slots,
        inputs.contexts, inputs.step_tables, inputs.items, stream, tokens.stride(0), tables.stride(0),
        inputs.step_tables.stride(0), embed.stride(0), stream.stride(0), inputs.min_tiles, each, len(inputs.items),
        lanes, PAGE=block_size, KEY_TILE=inputs.key_tile, ITEMS=triton.next_power_of_2(each), HIDDEN=hidden,
        COLUMNS=triton.next_power_of_2(hidden), num_warps=4, **early(True, stream),
    )  # fmt: skip
