"""block_copy: KV blocks from one cache into another, any blocks of any layers in one launch. Engines of one GPU or
host hand prompts over with it (engine/play/transfer_ways.py).

Must move: every byte once in and once out. A block is a hundred kilobytes or so, and a transfer has thousands: a
copy each would take longer to launch than to do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 2048  # a program copies


@triton.jit
def _copy_blocks(source, target, sources, targets, layers, source_blocks, target_blocks, WORDS,
                 BLOCK: tl.constexpr):  # fmt: skip
    pair, layer = tl.program_id(0), tl.load(layers + tl.program_id(1)).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    taken = (layer * source_blocks + tl.load(sources + pair)) * WORDS
    given = (layer * target_blocks + tl.load(targets + pair)) * WORDS
    mask = words < WORDS
    tl.store(target + given + words, tl.load(source + taken + words, mask=mask), mask=mask)


def copy_blocks(source: Tensor, target: Tensor, sources: Tensor, targets: Tensor, layers: Tensor) -> None:
    """target[layer, targets] = source[layer, sources] for every layer of `layers`; both [layers, blocks, words],
    the others int32."""
    words = source.shape[2]
    if not len(sources) or not len(layers):
        return
    _copy_blocks[len(sources), len(layers), triton.cdiv(words, _WORDS)](
        source, target, sources, targets, layers, source.shape[1], target.shape[1], words,
        BLOCK=min(_WORDS, triton.next_power_of_2(words)), num_warps=8,
    )  # fmt: skip


def load(device: torch.device, dtype: torch.dtype, words: int) -> None:
    """Compile it before the first transfer."""
    some = torch.zeros(1, 2, words, dtype=dtype, device=device)
    index = torch.zeros(1, dtype=torch.int32, device=device)
    copy_blocks(some[:, :1], some.clone(), index, index, index)
