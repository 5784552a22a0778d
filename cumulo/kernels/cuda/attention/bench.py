"""Paged attention timed: benchmark rows for `cumulo bench kernels`, and `tune`, which finds tile sizes on a
device.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.kernels.cuda.attention import mla_decode
from cumulo.kernels.cuda.attention.config import chunk_key, decode_key, fields
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan, attention_plan, reference, work
from cumulo.kernels.cuda.attention.paged_attention_chunk import ChunkConfig
from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig
from cumulo.kernels.cuda.timing import copies_past_cache, eager_us, graph_us
from cumulo.kernels.cuda.work import KernelRow

BLOCK_SIZE = 64

DECODE_MANY = [
    DecodeConfig(64, 4, 3, items_per_sm=16, min_tiles=6),
    DecodeConfig(64, 4, 3, items_per_sm=16, min_tiles=12),
    DecodeConfig(64, 4, 3, items_per_sm=8, min_tiles=4),
    DecodeConfig(64, 4, 3, items_per_sm=32, min_tiles=4),
    DecodeConfig(64, 4, 3, items_per_sm=3, min_tiles=4),
    DecodeConfig(64, 4, 2, items_per_sm=16, min_tiles=4),
    DecodeConfig(64, 4, 4, items_per_sm=16, min_tiles=4),
    DecodeConfig(64, 8, 3, items_per_sm=16, min_tiles=4),
    DecodeConfig(32, 4, 4, items_per_sm=16, min_tiles=8),
    DecodeConfig(32, 2, 4, items_per_sm=16, min_tiles=8),
    DecodeConfig(128, 4, 2, items_per_sm=16, min_tiles=2),
]
DECODE_FEW = [
    DecodeConfig(64, 4, 3, items_per_sm=3, min_tiles=1),
    DecodeConfig(64, 4, 3, items_per_sm=3, min_tiles=1, merge_registers=64),
    DecodeConfig(64, 4, 3, items_per_sm=2, min_tiles=1),
    DecodeConfig(64, 4, 3, items_per_sm=1, min_tiles=1, merge_registers=64),
    DecodeConfig(64, 4, 2, items_per_sm=2, min_tiles=1, merge_registers=64),
    DecodeConfig(64, 8, 3, items_per_sm=2, min_tiles=1, merge_registers=32),
    DecodeConfig(32, 4, 3, items_per_sm=4, min_tiles=1, merge_registers=32),
    DecodeConfig(32, 4, 3, items_per_sm=2, min_tiles=2, merge_registers=64),
]
CHUNK = [
    ChunkConfig(128, 64, 8, 4, overlap=2),
    ChunkConfig(128, 64, 8, 4, overlap=4),
    ChunkConfig(128, 64, 8, 6, overlap=2),
    ChunkConfig(128, 64, 8, 3, overlap=2),
    ChunkConfig(64, 64, 4, 3, overlap=2),
    ChunkConfig(64, 64, 4, 2, overlap=2),
    ChunkConfig(64, 64, 4, 3),
    ChunkConfig(128, 64, 8, 3),
]


@dataclass(frozen=True, slots=True)
class Shape:
    """A step to be timed: sequences of (new tokens, context length)."""

    name: str
    sequences: Sequence[tuple[int, int]]
    heads: int
    kv_heads: int
    dim: int = 128
    kv_dtype: torch.dtype = torch.bfloat16
    must_us: float | None = None
    aim_us: float | None = None

    @property
    def decodes(self) -> bool:
        return all(tokens == 1 for tokens, _ in self.sequences)


def decodes(batch: int, context: int, heads: int, kv_heads: int, **more: Any) -> Shape:
    name = f"B={batch} ctx={context} {heads}/{kv_heads} heads d=128"
    return Shape(name, [(1, context)] * batch, heads, kv_heads, **more)


def mixed_lengths(batch: int, low: int, high: int, heads: int, kv_heads: int) -> Shape:
    lengths = torch.randint(low, high, (batch,), generator=torch.Generator().manual_seed(0)).tolist()
    name = f"B={batch} ctx={low}..{high} {heads}/{kv_heads} heads d=128"
    return Shape(name, [(1, n) for n in lengths], heads, kv_heads)


def chunk(tokens: int, context: int, heads: int, kv_heads: int, batch: int = 1) -> Shape:
    name = f"{batch} x {tokens} new of {context} {heads}/{kv_heads} heads d=128"
    return Shape(name, [(tokens, context)] * batch, heads, kv_heads)


BENCH_SHAPES = [
    decodes(1, 1024, 32, 8, must_us=12.0, aim_us=8.0),
    decodes(1, 4096, 32, 8),
    decodes(1, 16384, 32, 8),
    decodes(16, 1024, 32, 8),
    decodes(16, 4096, 32, 8),
    decodes(64, 1024, 32, 8),
    decodes(64, 4096, 32, 8, must_us=268.0, aim_us=244.0),  # 4.0 and 4.4 TB/s
    decodes(256, 1024, 32, 8),
    decodes(256, 4096, 32, 8),
    decodes(1, 256, 16, 8),
    mixed_lengths(256, 100, 2048, 16, 8),
    decodes(512, 640, 16, 8),
    mixed_lengths(256, 100, 2048, 32, 4),
    decodes(512, 640, 32, 4),
    decodes(64, 4096, 32, 8, kv_dtype=torch.float8_e4m3fn),
    chunk(8000, 8000, 32, 8),
    chunk(16384, 16384, 32, 8),
    chunk(2048, 16384, 32, 8),
    chunk(8000, 8000, 16, 8),
    chunk(512, 512, 16, 8, batch=16),
]


class Bench:
    """One shape's tensors on the device: as many layers of cache as it takes to leave the L2 cache behind."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        generator = torch.Generator(device).manual_seed(0)
        used = [-(-context // BLOCK_SIZE) for _, context in shape.sequences]
        blocks = sum(used)
        per_layer = 2 * blocks * shape.kv_heads * BLOCK_SIZE * shape.dim * shape.kv_dtype.itemsize
        self.layers = copies_past_cache(per_layer)

        def cache() -> Tensor:
            size = (blocks, shape.kv_heads, BLOCK_SIZE, shape.dim)
            numbers = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator)
            return numbers.to(shape.kv_dtype)

        self.keys = [cache() for _ in range(self.layers)]
        self.values = [cache() for _ in range(self.layers)]
        tokens = sum(count for count, _ in shape.sequences)
        size = (tokens, shape.heads, shape.dim)
        self.query = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator)
        self.out = torch.full_like(self.query, float("nan"))
        counts = torch.tensor([0, *(count for count, _ in shape.sequences)])
        self.query_starts = counts.cumsum(0).to(device, torch.int32)
        self.context_lengths = torch.tensor([c for _, c in shape.sequences], dtype=torch.int32, device=device)
        order = torch.randperm(blocks, device=device, generator=generator).int()
        self.block_tables = torch.zeros((len(used), max(used)), dtype=torch.int32, device=device)
        first = 0
        for sequence, count in enumerate(used):
            self.block_tables[sequence, :count] = order[first : first + count]
            first += count
        self.scale = shape.dim**-0.5

    def plan(self, decode: DecodeConfig | None = None, chunk: ChunkConfig | None = None) -> AttentionPlan:
        shape = self.shape
        plan = attention_plan(
            len(self.query), len(shape.sequences), shape.heads, shape.kv_heads, shape.dim, BLOCK_SIZE,
            self.block_tables.shape[1], shape.decodes, False, self.device, kv_dtype=shape.kv_dtype, decode=decode,
            chunk=chunk,
        )  # fmt: skip
        plan.prepare(self.query_starts, self.context_lengths, self.block_tables)
        return plan

    def attend(self, plan: AttentionPlan, layer: int = 0) -> None:
        plan.attend(self.query, self.keys[layer], self.values[layer], self.out, self.scale)

    def us(self, plan: AttentionPlan, rounds: int = 7) -> float:
        if not self.shape.decodes:
            return eager_us(lambda: self.attend(plan), rounds)
        return graph_us(lambda layer: self.attend(plan, layer), self.layers, rounds=rounds)

    def error(self, plan: AttentionPlan) -> float:
        """Of the last sequence, the first 256 and last 256 of its tokens if there are more; in float32."""
        self.out.fill_(float("nan"))
        self.attend(plan)
        tokens, context = self.shape.sequences[-1]
        worst = 0.0
        for skipped in {0, max(0, tokens - 256)}:  # a chunk's begin sees less context
            count = min(256, tokens - skipped)
            rows = slice(len(self.query) - tokens + skipped, len(self.query) - tokens + skipped + count)
            seen = torch.tensor([context - tokens + skipped + count])
            exact, _ = reference(
                self.query[rows].float(), self.keys[0], self.values[0], torch.tensor([0, count]), seen,
                self.block_tables[-1:], self.scale,
            )  # fmt: skip
            worst = max(worst, float((self.out[rows].float() - exact).norm() / exact.norm()))
        return worst


def bench_rows(device: torch.device | str = "cuda") -> Iterator[KernelRow]:
    """Every shape of the comparison table, and prompts beside torch's own attention."""
    for shape in BENCH_SHAPES:
        bench = Bench(shape, torch.device(device))
        plan = bench.plan()
        must = work(shape.sequences, shape.heads, shape.kv_heads, shape.dim, kv_bytes=shape.kv_dtype.itemsize)
        config = plan.decode if shape.decodes else plan.chunk
        yield KernelRow(
            "paged_attention", shape.name, must, bench.us(plan), rivals_us=_dense_us(shape, bench),
            config=str(config), error=bench.error(plan), must_us=shape.must_us, aim_us=shape.aim_us,
        )  # fmt: skip
        del bench, plan
    yield _prepare_row(torch.device(device))
    yield from _mla_rows(torch.device(device))


def _dense_us(shape: Shape, bench: Bench) -> dict[str, float]:
    """torch's attention over contiguous keys, where it computes the same: whole prompts."""
    if shape.decodes or any(tokens != context for tokens, context in shape.sequences):
        return {}
    tokens, batch = shape.sequences[0][0], len(shape.sequences)
    dtype, device = torch.bfloat16, bench.device
    query = torch.randn((batch, shape.heads, tokens, shape.dim), dtype=dtype, device=device)
    key, value = (
        torch.randn((batch, shape.kv_heads, tokens, shape.dim), dtype=dtype, device=device) for _ in range(2)
    )
    found = {}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                found[name] = eager_us(
                    lambda: F.scaled_dot_product_attention(
                        query, key, value, is_causal=True, enable_gqa=True
                    ),
                    7,
                )
        except RuntimeError:  # not built in, or not for this shape
            continue
    return found


def _prepare_row(device: torch.device) -> KernelRow:
    """The work list, once per step."""
    shape = mixed_lengths(256, 100, 2048, 16, 8)
    bench = Bench(shape, device)
    plan = bench.plan()
    us = graph_us(lambda _: plan.prepare(bench.query_starts, bench.context_lengths, bench.block_tables))
    moved = plan.nbytes - plan.partial.nbytes - plan.partial_lse.nbytes
    return KernelRow("attention_work_list", shape.name, replace(work([], 1, 1, 1), bytes=moved), us)


def _mla_rows(device: torch.device) -> Iterator[KernelRow]:
    """Latent attention of DeepSeek-V2-Lite (16 heads) and V3 (128 heads)."""
    rank, rope, context = 512, 64, 4096
    for batch, heads in ((1, 16), (64, 16), (64, 128)):
        pages = context // BLOCK_SIZE
        layers = copies_past_cache(batch * context * (rank + rope) * 2)
        keys = [
            torch.randn(
                (batch * pages, 1, BLOCK_SIZE, rank + rope), device=device, dtype=torch.bfloat16
            )
            for _ in range(layers)
        ]  # fmt: skip
        tables = torch.randperm(batch * pages, device=device).int().view(batch, pages)
        query = torch.randn((batch, heads, rank + rope), device=device, dtype=torch.bfloat16)
        out = torch.full((batch, heads, rank), float("nan"), device=device, dtype=torch.bfloat16)
        starts = torch.arange(batch + 1, device=device, dtype=torch.int32)
        lengths = torch.full((batch,), context, device=device, dtype=torch.int32)
        plan = mla_decode.MlaPlan(batch, heads, rank, rope, BLOCK_SIZE, pages, device)
        plan.prepare(starts, lengths, tables)
        scale = 192**-0.5
        us = graph_us(lambda i: plan.attend(query, keys[i], out, scale), layers)
        plan.attend(query, keys[0], out, scale)
        exact, _ = mla_decode.reference(
            query[:1].float(), keys[0], starts[:2], lengths[:1], tables[:1], rank, scale
        )
        error = float((out[:1].float() - exact).norm() / exact.norm())
        yield KernelRow(
            "mla_decode", f"B={batch} ctx={context} {heads} heads",
            mla_decode.work([context] * batch, heads, rank, rope), us, config=str(plan.config), error=error,
        )  # fmt: skip


# Shape classes worth a tuned entry, each with the steps that decide.
TUNE_CLASSES: list[tuple[list[Shape], Sequence[DecodeConfig] | Sequence[ChunkConfig]]] = [
    ([decodes(1, 1024, 32, 8), decodes(1, 4096, 32, 8)], DECODE_FEW),
    ([decodes(1, 256, 16, 8), decodes(1, 1024, 16, 8)], DECODE_FEW),
    ([decodes(1, 1024, 32, 4), decodes(8, 2048, 32, 4)], DECODE_FEW),
    ([decodes(64, 4096, 32, 8), mixed_lengths(256, 100, 2048, 32, 8)], DECODE_MANY),
    ([mixed_lengths(256, 100, 2048, 16, 8), decodes(512, 640, 16, 8)], DECODE_MANY),
    ([mixed_lengths(256, 100, 2048, 32, 4), decodes(512, 640, 32, 4)], DECODE_MANY),
    ([chunk(8000, 8000, 32, 8)], CHUNK),
    ([chunk(8000, 8000, 16, 8)], CHUNK),
    ([chunk(8000, 8000, 32, 4)], CHUNK),
]


def tune(device: torch.device | str = "cuda", threads: int = 12) -> dict[str, dict[str, Any]]:
    """Times every candidate of every class and prints them; returns what `attention_config.use` takes.

    A class's winner has the least sum of (its time / the best time) over the class's shapes.
    """
    device = torch.device(device)
    jobs = [(shapes[0], config) for shapes, candidates in TUNE_CLASSES for config in candidates]
    _compile_all(device, threads, jobs)
    found: dict[str, dict[str, Any]] = {}
    for shapes, candidates in TUNE_CLASSES:
        times: list[list[float]] = []
        for shape in shapes:
            bench = Bench(shape, device)
            times.append([_candidate_us(bench, config) for config in candidates])
        losses = [sum(row[index] / min(row) for row in times) for index in range(len(candidates))]
        best = min(range(len(candidates)), key=losses.__getitem__)
        key = _key(shapes[0], device)
        found[key] = fields(candidates[best])
        print(key)
        for index, config in enumerate(candidates):
            mark = "*" if index == best else " "
            print(f" {mark} {config}: " + ", ".join(f"{row[index]:.1f} us" for row in times), flush=True)
    return found


def _key(shape: Shape, device: torch.device) -> str:
    group = shape.heads // shape.kv_heads
    if not shape.decodes:
        return chunk_key(group, shape.dim, shape.kv_dtype, BLOCK_SIZE)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return decode_key(group, shape.dim, shape.kv_dtype, len(shape.sequences) * shape.kv_heads, sms)


def _plan_with(bench: Bench, config: DecodeConfig | ChunkConfig) -> AttentionPlan:
    if isinstance(config, DecodeConfig):
        return bench.plan(decode=config)
    return bench.plan(chunk=config)


def _candidate_us(bench: Bench, config: DecodeConfig | ChunkConfig) -> float:
    """Infinite where the device refuses the configuration or its result is wrong."""
    try:
        plan = _plan_with(bench, config)
        error = bench.error(plan)
        if not error < 1e-2:
            print(f"   {config} is wrong by {error:.3g}")
            return float("inf")
        return bench.us(plan, rounds=3)
    except Exception as error:  # too much shared memory, and the like
        print(f"   {config}: {type(error).__name__}")
        torch.cuda.synchronize()
        return float("inf")


def _compile_all(
    device: torch.device, threads: int, jobs: Sequence[tuple[Shape, DecodeConfig | ChunkConfig]]
) -> None:
    """Compile every candidate at a small size first, many at a time: the compiler's back end leaves Python."""

    def once(shape: Shape, config: DecodeConfig | ChunkConfig) -> None:
        small = replace(shape, sequences=[(1, 70)] * 2 if shape.decodes else [(70, 70)] * 2)
        bench = Bench(small, device)
        bench.attend(_plan_with(bench, config))

    with ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(once, *job) for job in jobs]:
            job.exception()  # shows again, and is reported, when it is timed
    torch.cuda.synchronize()
