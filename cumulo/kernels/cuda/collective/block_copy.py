"""block_copy: KV blocks from one cache into another, any blocks of any layers in one launch. Engines of one GPU or
host hand prompts over with it (engine/play/transfer_cuda.py).

Must move: every byte once in and once out. A block is a hundred kilobytes or so, and a transfer has thousands: a
copy each would take longer to launch than to do.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS, _TURNS = 2048, 2  # a program copies so many, so often


@triton.jit(do_not_specialize=["first_layer", "source_blocks", "target_blocks"])
def _copy_blocks(source, target, source_2, target_2, places, first_layer, source_blocks, target_blocks,
                 WORDS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr):  # fmt: skip
    pair, layer = tl.program_id(0), tl.program_id(1).to(tl.int64) + first_layer
    piece = tl.program_id(2)
    if piece >= PIECES:
        source, target, piece = source_2, target_2, piece - PIECES
    taken = (layer * source_blocks + tl.load(places + pair)) * WORDS
    given = (layer * target_blocks + tl.load(places + tl.num_programs(0) + pair)) * WORDS
    for turn in tl.static_range(TURNS):
        words = (piece * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        mask = words < WORDS
        tl.store(target + given + words, tl.load(source + taken + words, mask=mask), mask=mask)


def copy_blocks(
    theirs: Sequence[Tensor],
    ours: Sequence[Tensor],
    places: Tensor,
    pairs: int,
    first_layer: int,
    layers: int,
) -> None:
    """ours[layer, target] = theirs[layer, source] of so many layers from the first, of keys and values (or keys
    that hold both) in one launch; all [layers, blocks, words], of one shape but for the blocks. `places`, int32: so
    many sources, then their targets. It begins at a multiple of 16 bytes: nothing is compiled but by `load`."""
    words = theirs[0].shape[2]
    if not pairs or not layers:
        return
    pieces = triton.cdiv(words, _WORDS * _TURNS)
    _copy_blocks[pairs, layers, pieces * len(ours)](
        theirs[0], ours[0], theirs[-1], ours[-1], places, first_layer, theirs[0].shape[1], ours[0].shape[1],
        WORDS=words, PIECES=pieces, BLOCK=min(_WORDS, triton.next_power_of_2(words)), TURNS=_TURNS, num_warps=4,
    )  # fmt: skip


def load(device: torch.device, dtype: torch.dtype, words: int) -> None:
    """Compile it before the first transfer."""
    some = torch.zeros(1, 2, words, dtype=dtype, device=device)
    places = torch.zeros(2, dtype=torch.int32, device=device)
    copy_blocks([some[:, :1]], [some.clone()], places, 1, 0, 1)
