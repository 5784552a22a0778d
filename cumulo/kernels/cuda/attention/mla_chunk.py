"""Latent attention (MLA) of sequences with several new tokens: prompts and chunks of them, in the absorbed form.
AttentionPlan launches it; in batch-invariant mode it takes sequences with one new token too.

Computes 2 * heads * (2 * rank + rope) FLOPs for every pair of a query and a position it sees. A program takes one
tile of the work list: its rows are (token, head) pairs, so that a key tile loaded once serves several tokens and
all their heads. As in `paged_attention_chunk` a row's arithmetic does not depend on which tile it is in.

The expanded form would compute (nope + rope + value) / (2 * rank + rope) of it, a third for DeepSeek-V2, but must
first make keys and values of every head out of the whole context, in memory that grows with it.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.attention.split_merge import LOG2_E


@dataclass(frozen=True, slots=True)
class MlaChunkConfig:
    """How the kernel cuts its work: as many rows as have their latent sums in a multiprocessor's registers."""

    rows: int = 64  # (token, head) pairs a program owns
    key_tile: int = 32
    num_warps: int = 8
    num_stages: int = 3

    def heads_at_once(self, heads: int) -> int:
        return min(heads, self.rows)

    def query_tile(self, heads: int) -> int:
        """Tokens a program owns."""
        return self.rows // self.heads_at_once(heads)


@triton.jit(do_not_specialize=["window", "table_stride"])
def _mla_chunk(query, keys, out, tiles, tables, scale, window, query_token_stride, query_head_stride,
               out_token_stride, out_head_stride, key_block_stride, key_stride, table_stride,
               HEADS: tl.constexpr, AT_ONCE: tl.constexpr, QUERY_TILE: tl.constexpr, ROWS: tl.constexpr,
               RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
               HAS_WINDOW: tl.constexpr):  # fmt: skip
    record = tiles + tl.program_id(0) * 8
    tokens = tl.load(record + 2)
    if tokens == 0:
        return
    sequence = tl.load(record)
    first_token = tl.load(record + 1)
    context = tl.load(record + 3)
    chunk_row = tl.load(record + 4)

    row = tl.arange(0, ROWS)
    token = first_token + row // AT_ONCE
    head = tl.program_id(1) * AT_ONCE + row % AT_ONCE
    mask = (row < QUERY_TILE * AT_ONCE) & (token < tokens) & (head < HEADS)
    token_row = (chunk_row + token).to(tl.int64)
    latent = tl.arange(0, RANK)
    rope = tl.arange(0, ROPE)
    position_in_tile = tl.arange(0, TILE)
    query_rows = query + (token_row * query_token_stride + head * query_head_stride)[:, None]
    q_latent = tl.load(query_rows + latent[None, :], mask=mask[:, None], other=0.0)
    q_rope = tl.load(query_rows + RANK + rope[None, :], mask=mask[:, None], other=0.0)
    table = tables + sequence.to(tl.int64) * table_stride
    scale_log2 = scale * LOG2_E

    own_position = context - tokens + token
    first_position = context - tokens + first_token
    last_position = tl.minimum(context, first_position + QUERY_TILE) - 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE
    end = last_position // TILE + 1
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK], tl.float32)
    last_page = (context - 1) // PAGE
    if TILE <= PAGE:
        page = tl.load(table + begin * TILE // PAGE)
    for tile in tl.range(begin, end):
        position = tile * TILE + position_in_tile
        inside = position < context
        if TILE <= PAGE:
            within = tile * TILE % PAGE + position_in_tile
            offset = page.to(tl.int64) * key_block_stride + within * key_stride
            # A tile early: addresses wait for it.
            page = tl.load(table + tl.minimum((tile + 1) * TILE // PAGE, last_page))
        else:
            pages = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
            offset = pages * key_block_stride + position % PAGE * key_stride
        key_rows = keys + offset[:, None]
        k_latent = tl.load(key_rows + latent[None, :], mask=inside[:, None], other=0.0).to(q_latent.dtype)
        k_rope = tl.load(key_rows + RANK + rope[None, :], mask=inside[:, None], other=0.0).to(q_rope.dtype)
        scores = tl.dot(q_rope, k_rope.T, input_precision="ieee")
        scores = tl.dot(q_latent, k_latent.T, scores, input_precision="ieee")
        visible = (position[None, :] <= own_position[:, None]) & inside[None, :]
        if HAS_WINDOW:
            visible = visible & (position[None, :] > own_position[:, None] - window)
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        safe_top = new_top
        if HAS_WINDOW:  # a row may have seen nothing yet
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - safe_top[:, None])
        keep = tl.exp2(top - safe_top)
        weight = weight * keep + tl.sum(p, axis=1)
        acc = tl.dot(p.to(q_latent.dtype), k_latent, acc * keep[:, None], input_precision="ieee")
        top = new_top

    target = out + (token_row * out_token_stride + head * out_head_stride)[:, None]
    result = acc * (1.0 / weight)[:, None]
    tl.store(target + latent[None, :], result.to(out.dtype.element_ty), mask=mask[:, None])


def launch_mla_chunks(
    query: Tensor,
    keys: Tensor,
    out: Tensor,
    tiles: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None,
    config: MlaChunkConfig,
) -> None:
    """One layer: query [T, H, rank + rope] over keys [blocks, 1, block_size, rank + rope] into out [T, H, rank]."""
    heads, rank = out.shape[1], out.shape[2]
    at_once = config.heads_at_once(heads)
    _mla_chunk[(len(tiles), -(-heads // at_once))](
        query,
        keys,
        out,
        tiles,
        tables,
        scale,
        window or 0,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        keys.stride(0),
        keys.stride(2),
        tables.stride(0),
        HEADS=heads,
        AT_ONCE=at_once,
        QUERY_TILE=config.query_tile(heads),
        ROWS=config.rows,
        RANK=rank,
        ROPE=query.shape[2] - rank,
        PAGE=keys.shape[2],
        TILE=config.key_tile,
        HAS_WINDOW=window is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
