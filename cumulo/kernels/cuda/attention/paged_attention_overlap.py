"""Chunk attention for Hopper with its asynchrony written out: matrix units work while the softmax is computed.
`paged_attention_chunk.launch_chunks` calls it for the caches it can take.

The arithmetic and its order are those of `paged_attention_chunk`; what differs is who waits for whom. Scores of
tile i + 1 are issued before the softmax of tile i begins, and the output product of tile i - 1 is still in flight
then, so the matrix units always have a queue (FlashAttention-3, Shah et al. 2024, section 3.2, one tile deeper).
Queries stay in registers: from shared memory, 64 of them by 64 keys would ask for all of its bandwidth. Keys and
values come page by page through the tensor memory accelerator into rings; one CTA barrier a tile frees a slot.

Gluon gives these controls, and no interpreter plays it: the comparison with `reference` runs on a GPU only.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cumulo.kernels.cuda.attention.split_merge import LOG2_E

# Triton renamed both on the way from 3.6 to 3.9.
_copy_page = (
    hopper.tma.async_load if hasattr(hopper.tma, "async_load") else hopper.tma.async_copy_global_to_shared
)
_all_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _fetch(keys, key_ring, key_full, key_page, key_tile, values, value_ring, value_full, value_page,
           value_tile, end, kv_head, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr,
           SLOTS: gl.constexpr):  # fmt: skip
    """Start the copies of a key tile and a value tile into their slots; nothing past the last tile."""
    key_slot, value_slot = key_tile % SLOTS, value_tile % SLOTS
    hopper.mbarrier.expect(key_full.index(key_slot), keys.block_type.nbytes, pred=key_tile < end)
    hopper.mbarrier.expect(value_full.index(value_slot), values.block_type.nbytes, pred=value_tile < end)
    row = (key_page * KV_HEADS + kv_head) * PAGE + key_tile * TILE % PAGE
    _copy_page(keys, [row, 0], key_full.index(key_slot), key_ring.index(key_slot), pred=key_tile < end)
    row = (value_page * KV_HEADS + kv_head) * PAGE + value_tile * TILE % PAGE
    _copy_page(
        values, [row, 0], value_full.index(value_slot), value_ring.index(value_slot), pred=value_tile < end
    )


@gluon.jit
def _page(table, tile, end, PAGE: gl.constexpr, TILE: gl.constexpr):
    return gl.load(table + gl.minimum(tile, end - 1) * TILE // PAGE)


@gluon.jit
def _scores(q, keys, full, tile, wanted, zero, SLOTS: gl.constexpr):
    """Issue the scores of a tile once its keys are there; of whatever the slot holds if none are wanted."""
    slot = tile % SLOTS
    hopper.mbarrier.wait(full.index(slot), (tile // SLOTS) & 1, pred=wanted)
    return hopper.warpgroup_mma(q, keys.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(scores, weight, top, scale_log2):
    """The tile's weights, what is kept of the earlier ones, and the running sum and maximum."""
    new_top = gl.maximum(top, gl.max(scores, axis=1) * scale_log2)
    keep = gl.exp2(top - new_top)
    p = gl.exp2(scores * scale_log2 - new_top[:, None])
    return p, keep, weight * keep + gl.sum(p, axis=1), new_top


@gluon.jit
def _output(p, keep, acc, values, full, tile, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue the output product of a tile once its values are there; `acc` has no product in flight."""
    slot = tile % SLOTS
    acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, LAYOUT))[:, None]
    p = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, LAYOUT, 2))
    hopper.mbarrier.wait(full.index(slot), (tile // SLOTS) & 1)
    return hopper.warpgroup_mma(p, values.index(slot), acc, is_async=True)


@gluon.jit(do_not_specialize=["table_stride"])
def _chunk_overlapped(query, keys, values, out, tiles, tables, scale, query_token_stride,
                      query_head_stride, out_token_stride, out_head_stride, table_stride,
                      KV_HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
                      QUERY_TILE: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr,
                      SLOTS: gl.constexpr, BUNDLE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    record = tiles + gl.program_id(0) * 8
    kv_head = gl.program_id(1)
    tokens = gl.load(record + 2)
    if tokens == 0:
        return
    sequence = gl.load(record)
    first_token = gl.load(record + 1)
    context = gl.load(record + 3)
    chunk_row = gl.load(record + 4)
    table = tables + sequence.to(gl.int64) * table_stride

    first_position = context - tokens + first_token
    last_position = gl.minimum(context, first_position + QUERY_TILE) - 1
    end = last_position // TILE + 1
    # Tiles all rows see are folded in bundles without a mask, the rest (one at least) one by one with it.
    bundles = gl.minimum((first_position + 1) // TILE, end - 1) // BUNDLE

    key_ring = gl.allocate_shared_memory(keys.dtype, [SLOTS, TILE, DIM], keys.layout)
    value_ring = gl.allocate_shared_memory(values.dtype, [SLOTS, TILE, DIM], values.layout)
    key_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    for index in gl.static_range(SLOTS):
        hopper.mbarrier.init(key_full.index(index), count=1)
        hopper.mbarrier.init(value_full.index(index), count=1)
    hopper.fence_async_shared()
    _all_threads()
    # Value tiles are fetched one less far ahead than key tiles; the first number stands for none.
    for ahead in gl.static_range(SLOTS):
        page = _page(table, ahead, end, PAGE, TILE)
        earlier_page = _page(table, gl.maximum(ahead - 1, 0), end, PAGE, TILE)
        _fetch(keys, key_ring, key_full, page, ahead, values, value_ring, value_full, earlier_page,
               ahead - 1 if ahead else end, end, kv_head, KV_HEADS, PAGE, TILE, SLOTS)  # fmt: skip

    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TILE, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, DIM, 16])
    query_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, copy_layout))
    column = gl.arange(0, DIM, gl.SliceLayout(0, copy_layout))
    token = first_token + row // GROUP
    inside = (row < QUERY_TILE * GROUP) & (token < tokens)
    offset = (chunk_row + token).to(gl.int64) * query_token_stride
    offset += (kv_head * GROUP + row % GROUP) * query_head_stride
    q = gl.load(query + offset[:, None] + column[None, :], mask=inside[:, None], other=0.0)
    q = gl.convert_layout(q, query_layout)

    scale_log2 = scale * LOG2_E
    zero = gl.zeros([ROWS, TILE], gl.float32, score_layout)
    weight = gl.zeros([ROWS], gl.float32, row_layout)
    top = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    scores = hopper.warpgroup_mma_wait(0, deps=[_scores(q, key_ring, key_full, 0, True, zero, SLOTS)])
    acc = hopper.warpgroup_mma_init(gl.zeros([ROWS, DIM], gl.float32, out_layout))

    for bundle in range(bundles):
        # In flight: the output product of the tile before. It alone may be at the loop's end, and all must be
        # waited for before it is used, or ptxas makes every product wait for itself.
        these_scores = hopper.warpgroup_mma_init(scores)
        for step in gl.static_range(BUNDLE):
            tile = bundle * BUNDLE + step
            earlier_page = _page(table, tile + SLOTS - 1, end, PAGE, TILE)
            page = _page(table, tile + SLOTS, end, PAGE, TILE)
            next_scores = _scores(q, key_ring, key_full, tile + 1, True, zero, SLOTS)
            scores = hopper.warpgroup_mma_wait(2, deps=[these_scores])
            p, keep, weight, top = _softmax(scores, weight, top, scale_log2)
            done, p = hopper.warpgroup_mma_wait(1 if step else 0, deps=[acc, p])
            acc = _output(p, keep, done, value_ring, value_full, tile, SLOTS, out_layout)
            _all_threads()  # everyone is done with the keys of this tile and the values of the one before
            _fetch(keys, key_ring, key_full, page, tile + SLOTS, values, value_ring, value_full, earlier_page,
                   tile + SLOTS - 1, end, kv_head, KV_HEADS, PAGE, TILE, SLOTS)  # fmt: skip
            these_scores = next_scores
        scores = hopper.warpgroup_mma_wait(1, deps=[these_scores])

    own_row = gl.arange(0, ROWS, row_layout)
    own_position = first_position + own_row // GROUP
    position_in_tile = gl.arange(0, TILE, gl.SliceLayout(0, score_layout))
    done = hopper.warpgroup_mma_wait(0, deps=[acc])
    for tile in range(bundles * BUNDLE, end):
        earlier_page = _page(table, tile + SLOTS - 1, end, PAGE, TILE)
        page = _page(table, tile + SLOTS, end, PAGE, TILE)
        next_scores = _scores(q, key_ring, key_full, tile + 1, tile + 1 < end, zero, SLOTS)
        position = tile * TILE + position_in_tile
        visible = (position[None, :] <= own_position[:, None]) & (position < context)[None, :]
        scores = gl.where(visible, scores, float("-inf"))
        p, keep, weight, top = _softmax(scores, weight, top, scale_log2)
        if (tile + 1) * TILE > context:  # whatever lies past the context, a NaN even, must not matter
            slot = tile % SLOTS
            hopper.mbarrier.wait(value_full.index(slot), (tile // SLOTS) & 1)
            v = value_ring.index(slot).load(copy_layout)
            kept = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, copy_layout)) < context
            value_ring.index(slot).store(gl.where(kept[:, None], v, gl.zeros_like(v)))
            hopper.fence_async_shared()
            _all_threads()
        product = _output(p, keep, done, value_ring, value_full, tile, SLOTS, out_layout)
        scores, done = hopper.warpgroup_mma_wait(0, deps=[next_scores, product])
        _all_threads()
        _fetch(keys, key_ring, key_full, page, tile + SLOTS, values, value_ring, value_full, earlier_page,
               tile + SLOTS - 1, end, kv_head, KV_HEADS, PAGE, TILE, SLOTS)  # fmt: skip

    result = done * gl.convert_layout(1.0 / weight, gl.SliceLayout(1, out_layout))[:, None]
    result = gl.convert_layout(result.to(out.dtype.element_ty), copy_layout)
    # Read again, so that nothing made of them occupies registers in the loops.
    tokens = gl.load(record + 2)
    first_token = gl.load(record + 1)
    chunk_row = gl.load(record + 4)
    token = first_token + row // GROUP
    inside = (row < QUERY_TILE * GROUP) & (token < tokens)
    offset = (chunk_row + token).to(gl.int64) * out_token_stride
    offset += (kv_head * GROUP + row % GROUP) * out_head_stride
    gl.store(out + offset[:, None] + column[None, :], result, mask=inside[:, None])


def fits(query: Tensor, keys: Tensor, values: Tensor, key_tile: int) -> bool:
    """Whether these tensors can go through this kernel; it depends on the model and the cache only."""
    dim, page = keys.shape[-1], keys.shape[2]
    return (
        query.device.type == "cuda"
        and torch.cuda.get_device_capability(query.device)[0] == 9
        and query.dtype in (torch.bfloat16, torch.float16)
        and dim in (64, 128)
        and page % key_tile == 0
        and all(cache.dtype == query.dtype and cache.is_contiguous() for cache in (keys, values))
        and all(cache.data_ptr() % 16 == 0 for cache in (keys, values))
    )


def page_layout(tile: int, dim: int) -> gl.NVMMASharedLayout:
    """How a tile of 16-bit numbers lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([tile, dim], gl.bfloat16)


def launch_overlapped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    tiles: Tensor,
    tables: Tensor,
    scale: float,
    rows: int,
    key_tile: int,
    num_warps: int,
    slots: int,
    bundle: int,
) -> None:
    """One launch over all tiles. In a `bundle` of tiles the matrix units drain once."""
    heads, dim = query.shape[1], query.shape[2]
    kv_heads, page = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    layout = page_layout(key_tile, dim)
    descriptors = [
        TensorDescriptor(cache, [cache.numel() // dim, dim], [dim, 1], [key_tile, dim], layout)
        for cache in (keys, values)
    ]
    _chunk_overlapped[(len(tiles), kv_heads)](
        query,
        *descriptors,
        out,
        tiles,
        tables,
        scale,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=rows,
        QUERY_TILE=rows // group,
        DIM=dim,
        PAGE=page,
        TILE=key_tile,
        SLOTS=slots,
        BUNDLE=bundle,
        num_warps=num_warps,
    )
