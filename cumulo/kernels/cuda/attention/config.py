"""Which tile sizes attention uses: what `tune` measured for a shape class, or a default reasoned from the
roofline.

`TUNED` maps a shape class (a readable key) to a configuration's fields; it is plain JSON. AttentionPlan asks
here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from cumulo.kernels.cuda.attention.paged_attention_chunk import ChunkConfig
from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig

TUNED: dict[str, dict[str, Any]] = {}


def decode_key(group: int, head_dim: int, kv_dtype: torch.dtype, pairs: int, multiprocessors: int) -> str:
    """`pairs` of a sequence and a kv head: few of them must be split to fill the device, many need not."""
    amount = "few" if pairs <= 2 * multiprocessors else "many"
    return f"decode group={group} dim={head_dim} {_name(kv_dtype)} {amount}"


def chunk_key(group: int, head_dim: int, kv_dtype: torch.dtype, block_size: int) -> str:
    return f"chunk group={group} dim={head_dim} {_name(kv_dtype)} page={block_size}"


def decode_config(
    group: int, head_dim: int, kv_dtype: torch.dtype, pairs: int, multiprocessors: int
) -> DecodeConfig:
    wide = head_dim > 128
    default = DecodeConfig(key_tile=32 if wide else 64, num_stages=3)
    if pairs <= 2 * multiprocessors:
        default = replace(default, items_per_sm=3, min_tiles=1)
    key = decode_key(group, head_dim, kv_dtype, pairs, multiprocessors)
    return replace(default, **TUNED.get(key, {}))


def chunk_config(
    group: int, head_dim: int, kv_dtype: torch.dtype, block_size: int, invariant: bool
) -> ChunkConfig:
    """A row's bits do not depend on the batch whatever these are. With `invariant` they do not depend on the size
    of a page either, so what was tuned for one is left alone.

    Two programs of 64 rows on a multiprocessor take turns at the matrix units, which on an H200 was worth more
    than the shared loads of one of 128 (447 and 401 TFLOP/s). An 8-bit cache, whose keys pass through
    registers, and wide heads take fewer keys at once.
    """
    if head_dim > 128:
        default = ChunkConfig(key_tile=32, num_stages=2)
    elif kv_dtype.itemsize == 1:
        default = ChunkConfig(key_tile=64, num_stages=3)
    else:
        default = ChunkConfig(rows=64, key_tile=64, num_warps=4, num_stages=3)
    if invariant:
        return default
    return replace(default, **TUNED.get(chunk_key(group, head_dim, kv_dtype, block_size), {}))


def use(tuned: Mapping[str, Mapping[str, Any]]) -> None:
    """Take in what `tune` returned on this kind of device."""
    TUNED.update({key: dict(fields) for key, fields in tuned.items()})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
