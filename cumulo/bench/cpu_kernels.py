"""Every CPU kernel against a ceiling measured in the same run and against torch. `cumulo bench kernels` prints it.

A row's value is a rate; its note says what share of the machine's ceiling that is (reading memory for one token,
the dot instruction for many) and how many times torch's own operators are slower.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.base.report import Row
from cumulo.kernels.cpu import paged_attention as attention
from cumulo.kernels.cpu.affine_blocks import AffineBlocks
from cumulo.kernels.cpu.library import NativeLibrary, native
from cumulo.kernels.cpu.packed_linear import PackedWeight

SHAPES = ((3072, 576), (576, 1536))  # gate/up and down of a 135M model
TOKENS = (1, 16, 512)


@dataclass(slots=True)
class BenchBatch:
    query_starts: Tensor
    context_lengths: Tensor
    block_tables: Tensor


def best_s(work: Callable[[], object], budget_s: float = 0.25) -> float:
    """The fastest of repeated runs: neighbours only ever make a run slower."""
    work()
    best, end = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def rows() -> list[Row]:
    library = native()
    if library is None:
        return [Row("native kernels", "none", note="no C++ compiler: torch's operators are used")]
    threads = torch.get_num_threads()
    data = torch.zeros(64 * 2**20 // 4)  # past every cache
    read_gb_s = data.nbytes / best_s(lambda: library.read_bytes(data, threads)) / 1e9
    repeats = 2_000_000
    dot_gmac_s = library.dot_peak(repeats, threads) / best_s(lambda: library.dot_peak(repeats, threads)) / 1e9
    found = [
        Row("ceiling: read", read_gb_s, "GB/s", note=f"{threads} threads, 64 MiB"),
        Row("ceiling: dot", dot_gmac_s, "GMAC/s", note=f"{library.dot_name} on registers"),
    ]
    for shape in SHAPES:
        found += _linear_rows(library, shape, read_gb_s, dot_gmac_s)
    return found + _attention_rows(read_gb_s)


def random_blocks(rows_: int, columns: int, bits: int, group: int, seed: int = 0) -> AffineBlocks:
    random = np.random.default_rng(seed)
    low, high, kind = (0, 16, np.uint8) if bits == 4 else (-127, 128, np.int8)
    scale = random.uniform(0.001, 0.01, (rows_, columns // group)).astype(np.float16).astype(np.float32)
    minimum = (-8 * scale).astype(np.float16).astype(np.float32) if bits == 4 else None
    codes = random.integers(low, high, (rows_, columns)).astype(kind)
    return AffineBlocks(codes, scale, minimum, bits, group)


def _linear_rows(
    library: NativeLibrary, shape: tuple[int, int], read_gb_s: float, dot_gmac_s: float
) -> list[Row]:
    blocks = random_blocks(*shape, bits=4, group=32)
    # Enough copies that one token's weights come from memory, as they do in a model.
    copies = [PackedWeight.pack(blocks, library=library) for _ in range(24)]
    dense = torch.from_numpy(blocks.dequantize())
    found = []
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(tokens))
        used = copies if tokens == 1 else copies[:1]
        seconds = best_s(lambda x=x, used=used: [w.matmul(x) for w in used]) / len(used)  # type: ignore[misc]
        gmac_s = tokens * shape[0] * shape[1] / seconds / 1e9
        bound, share = (
            ("read", copies[0].nbytes / seconds / 1e9 / read_gb_s)
            if tokens == 1
            else ("dot", 2 * gmac_s / dot_gmac_s)  # two int8 products per 16-bit activation
        )
        slower = best_s(lambda x=x: F.linear(x, dense)) / seconds  # type: ignore[misc]
        note = f"{share:.0%} of the {bound} ceiling; slower: torch float32 x{slower:.1f}"
        found.append(Row(f"linear {shape[0]}x{shape[1]} 4-bit, {tokens} tokens", gmac_s, "GMAC/s", note=note))
    return found


def _attention_rows(read_gb_s: float) -> list[Row]:
    heads, kv_heads, dim, block_size = 9, 3, 64, 16
    found = []
    for name, sequences, count, context in (
        ("decode 1 x 512", 1, 1, 512),
        ("decode 16 x 256", 16, 1, 256),
        ("prefill 512", 1, 512, 512),
    ):
        per_sequence = context // block_size
        shape = (sequences * per_sequence, kv_heads, block_size, dim)
        generator = torch.Generator().manual_seed(0)
        keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        query = torch.randn((sequences * count, heads, dim), generator=generator)
        batch = BenchBatch(
            torch.arange(sequences + 1, dtype=torch.int32) * count,
            torch.full((sequences,), context, dtype=torch.int32),
            torch.arange(sequences * per_sequence, dtype=torch.int32).view(sequences, per_sequence),
        )
        arguments = (query, keys, values, batch, dim**-0.5)
        seconds = best_s(lambda a=arguments: attention.paged_attention(*a))  # type: ignore[misc]
        slower = best_s(lambda a=arguments: attention.reference(*a)) / seconds  # type: ignore[misc]
        if count == 1:
            rate, unit = (keys.nbytes + values.nbytes) / seconds / 1e9, "GB/s"
            note = f"{rate / read_gb_s:.0%} of the read ceiling; slower: torch x{slower:.1f}"
        else:
            rate, unit = context * (context + 1) / 2 * heads * 2 * dim / seconds / 1e9, "GMAC/s"
            note = f"slower: torch x{slower:.1f}"
        found.append(Row(f"attention {name}", rate, unit, note=note))
    return found
