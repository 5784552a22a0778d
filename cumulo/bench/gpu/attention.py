"""Rows of `cumulo bench kernels` for attention: over pages, over latents, and dense with gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulo.bench.gpu.timing import (
    KernelRow,
    Work,
    copies_past_cache,
    eager_us,
    graph_us,
    randn,
    relative_error,
    timed,
)
from cumulo.kernels.cpu.paged_attention import reference
from cumulo.kernels.cuda.attention import flash_attention as flash
from cumulo.kernels.cuda.attention.flash_attention_backward import BackwardConfig, launch_backward
from cumulo.kernels.cuda.attention.flash_attention_forward import ForwardConfig, launch_forward
from cumulo.kernels.cuda.attention.paged_attention import AttentionPlan

BLOCK_SIZE = 64
HEADS = {128: (16, 16), 64: (32, 8)}  # what training shapes have
CHECKED = [300, 1, 512, 211]  # lengths of documents that are small enough for the reference


@dataclass(frozen=True, slots=True)
class Step:
    """A step to be timed: sequences of (new tokens, context length)."""

    name: str
    sequences: Sequence[tuple[int, int]]
    heads: int
    kv_heads: int
    kv_dtype: torch.dtype = torch.bfloat16
    must_us: float | None = None
    aim_us: float | None = None
    dim: int = 128

    @property
    def decodes(self) -> bool:
        return all(tokens == 1 for tokens, _ in self.sequences)

    @property
    def work(self) -> Work:
        moved = flops = 0
        for tokens, context in self.sequences:
            seen = tokens * (2 * context - tokens + 1) // 2
            moved += 2 * context * self.kv_heads * self.dim * self.kv_dtype.itemsize
            moved += 4 * tokens * self.heads * self.dim
            flops += 4 * seen * self.heads * self.dim
        return Work(moved, flops)


def decodes(batch: int, context: int, heads: int, kv_heads: int, **more: Any) -> Step:
    name = f"B={batch} ctx={context} {heads}/{kv_heads} heads d=128"
    return Step(name, [(1, context)] * batch, heads, kv_heads, **more)


def mixed_lengths(batch: int, low: int, high: int, heads: int, kv_heads: int) -> Step:
    lengths = torch.randint(low, high, (batch,), generator=torch.Generator().manual_seed(0)).tolist()
    name = f"B={batch} ctx={low}..{high} {heads}/{kv_heads} heads d=128"
    return Step(name, [(1, n) for n in lengths], heads, kv_heads)


def chunk(tokens: int, context: int, heads: int, kv_heads: int, batch: int = 1) -> Step:
    name = f"{batch} x {tokens} new of {context} {heads}/{kv_heads} heads d=128"
    return Step(name, [(tokens, context)] * batch, heads, kv_heads)


STEPS = (
    decodes(1, 1024, 32, 8, must_us=12.0, aim_us=8.0),
    decodes(1, 16384, 32, 8),
    decodes(16, 4096, 32, 8),
    decodes(64, 4096, 32, 8, must_us=268.0, aim_us=244.0),  # 4.0 and 4.4 TB/s
    decodes(256, 1024, 32, 8),
    decodes(1, 256, 16, 8),
    mixed_lengths(256, 100, 2048, 16, 8),
    decodes(512, 640, 16, 8),
    mixed_lengths(256, 100, 2048, 32, 4),
    decodes(64, 4096, 32, 8, kv_dtype=torch.float8_e4m3fn),
    chunk(8000, 8000, 32, 8),
    chunk(2048, 16384, 32, 8),
    chunk(8000, 8000, 16, 8),
    chunk(512, 512, 16, 8, batch=16),
)


def exactly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    contexts: Tensor,
    tables: Tensor,
    scale: float,
) -> Tensor:
    """Attention by torch's operators, in the query's type."""
    batch: Any = SimpleNamespace(query_starts=starts, context_lengths=contexts, block_tables=tables)
    return reference(query, keys, values, batch, scale)


class PagedBench:
    """One step's tensors on the device: as many layers of cache as it takes to leave the L2 cache behind."""

    def __init__(self, step: Step) -> None:
        self.step = step
        used = [-(-context // BLOCK_SIZE) for _, context in step.sequences]
        blocks = sum(used)
        size = (blocks, step.kv_heads, BLOCK_SIZE, step.dim)
        self.layers = copies_past_cache(2 * blocks * step.kv_heads * BLOCK_SIZE * step.dim * 2)
        self.keys, self.values = (
            [randn(*size).to(step.kv_dtype) for _ in range(self.layers)] for _ in range(2)
        )
        self.query = randn(sum(count for count, _ in step.sequences), step.heads, step.dim)
        self.out = torch.full_like(self.query, float("nan"))
        counts = torch.tensor([0, *(count for count, _ in step.sequences)])
        self.query_starts = counts.cumsum(0).to("cuda", torch.int32)
        self.contexts = torch.tensor([c for _, c in step.sequences], dtype=torch.int32, device="cuda")
        order = torch.randperm(blocks, device="cuda").int().split(used)
        self.tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
        self.scale = step.dim**-0.5

    def plan(self, **configs: Any) -> AttentionPlan:
        step = self.step
        plan = AttentionPlan(
            len(self.query), len(step.sequences), step.heads, step.kv_heads, step.dim, BLOCK_SIZE,
            self.tables.shape[1], step.decodes, False, self.query.device, kv_dtype=step.kv_dtype, **configs,
        )  # fmt: skip
        plan.prepare(self.query_starts, self.contexts, self.tables)
        return plan

    def us(self, plan: AttentionPlan, rounds: int = 7) -> float:
        def attend(layer: int = 0) -> None:
            plan.attend(self.query, self.keys[layer], self.values[layer], self.out, self.scale)

        return graph_us(attend, self.layers, rounds=rounds) if self.step.decodes else eager_us(attend, rounds)

    def error(self, plan: AttentionPlan) -> float:
        """Of the last sequence's last tokens, 256 at most, in float32."""
        self.out.fill_(float("nan"))
        plan.attend(self.query, self.keys[0], self.values[0], self.out, self.scale)
        tokens, context = self.step.sequences[-1]
        count = min(256, tokens)
        exact = exactly(
            self.query[-count:].float(), self.keys[0], self.values[0], torch.tensor([0, count]),
            torch.tensor([context]), self.tables[-1:], self.scale,
        )  # fmt: skip
        return relative_error(self.out[-count:], exact)

    def dense_us(self) -> dict[str, float]:
        """torch's attention over contiguous keys, where it computes the same: whole prompts."""
        step = self.step
        if step.decodes or any(tokens != context for tokens, context in step.sequences):
            return {}
        tokens, batch = step.sequences[0][0], len(step.sequences)
        query, key, value = (
            randn(batch, count, tokens, step.dim) for count in (step.heads, step.kv_heads, step.kv_heads)
        )
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            us = eager_us(
                lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True), 7
            )
        return {"cuDNN": us}


def paged_rows() -> Iterator[KernelRow]:
    for step in STEPS:
        bench = PagedBench(step)
        plan = bench.plan()
        yield KernelRow(
            "paged_attention", step.name, step.work, bench.us(plan), bench.dense_us(),
            config=str(plan.decode if step.decodes else plan.chunk), error=bench.error(plan),
            must_us=step.must_us, aim_us=step.aim_us,
        )  # fmt: skip
        del bench, plan


def latent_rows() -> Iterator[KernelRow]:
    """Latent attention of DeepSeek-V2-Lite (16 heads) and V3 (128 heads)."""
    rank, rope, context, scale = 512, 64, 4096, 192**-0.5
    for batch, heads in ((1, 16), (64, 16), (64, 128)):
        pages = context // BLOCK_SIZE
        layers = copies_past_cache(batch * context * (rank + rope) * 2)
        keys = [randn(batch * pages, 1, BLOCK_SIZE, rank + rope) for _ in range(layers)]
        tables = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
        query, out = randn(batch, heads, rank + rope), randn(batch, heads, rank)
        starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        plan = AttentionPlan(
            batch, batch, heads, 1, rank + rope, BLOCK_SIZE, pages, True, False, query.device, rank=rank
        )
        plan.prepare(starts, lengths, tables)
        plan.attend(query, keys[0], keys[0], out, scale)
        latents = keys[0][..., :rank]
        exact = exactly(query[:1].float(), keys[0], latents, starts[:2], lengths[:1], tables[:1], scale)
        moved = 2 * batch * (context * (rank + rope) + heads * (2 * rank + rope))
        yield timed(
            "mla_decode", f"B={batch} ctx={context} {heads} heads",
            Work(moved, 2 * heads * (2 * rank + rope) * batch * context),
            lambda i: plan.attend(query, keys[i], keys[i], out, scale), layers, config=str(plan.decode),
            error=relative_error(out[:1], exact),
        )  # fmt: skip


class DenseBench:
    """One batch of packed documents on the device, with gradients."""

    def __init__(self, lengths: list[int], dim: int, heads: tuple[int, int] | None = None) -> None:
        self.lengths, self.dim = lengths, dim
        self.heads, self.kv_heads = heads or HEADS[dim]
        tokens = sum(lengths)
        self.query, self.key, self.value, self.grad_out = (
            randn(tokens, heads, dim) for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        )
        self.starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        self.out = torch.full_like(self.query, float("nan"))
        self.lse = torch.empty((self.heads, tokens), device="cuda")
        self.grads = tuple(torch.full_like(x, float("nan")) for x in (self.query, self.key, self.value))

    def forward(self, config: ForwardConfig) -> None:
        launch_forward(
            self.query, self.key, self.value, self.starts, self.starts, True, self.dim**-0.5, self.out, self.lse,
            config,
        )  # fmt: skip

    def backward(self, for_keys: BackwardConfig, for_queries: BackwardConfig) -> None:
        launch_backward(
            self.query, self.key, self.value, self.out, self.lse, self.grad_out, self.starts, self.starts,
            True, self.dim**-0.5, (self.grads[0], self.grads[1], self.grads[2]), for_keys, for_queries,
        )  # fmt: skip

    def exact(self) -> list[Tensor]:
        """Output and the three gradients, in float32."""
        leaves = [x.float().requires_grad_() for x in (self.query, self.key, self.value)]
        query, key, value = leaves
        out, _ = flash.reference(query, key, value, self.starts, self.starts, True, self.dim**-0.5)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad_out.float())]

    def work(self, backward: bool) -> Work:
        """4 FLOPs per visible pair and column, backward 10."""
        tokens, pairs = sum(self.lengths), sum(n * (n + 1) // 2 for n in self.lengths)
        moved = 4 * tokens * self.dim * (self.heads + self.kv_heads) + 4 * tokens * self.heads
        return Work(moved * (2 if backward else 1), (10 if backward else 4) * pairs * self.heads * self.dim)

    def cudnn_us(self) -> tuple[float, float]:
        """Forward and backward of cuDNN's, of documents of equal length."""
        batch = len(self.lengths)
        leaves = [
            x.view(batch, -1, *x.shape[1:]).detach().requires_grad_()
            for x in (self.query, self.key, self.value)
        ]
        upstream = self.grad_out.view(batch, -1, *self.grad_out.shape[1:])
        with torch.no_grad():
            forward = eager_us(lambda: flash.flash_attention(*leaves))
        out = flash.flash_attention(*leaves)
        return forward, eager_us(lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True))


def dense_rows() -> Iterator[KernelRow]:
    """Causal attention of long sequences, beside cuDNN's, and of many packed documents, forward and backward."""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(64, 2048, (16,), generator=generator).tolist()
    for dim, lengths in (
        *((dim, [length] * (16384 // length)) for dim, length in ((128, 2048), (128, 16384), (64, 4096))),
        *((dim, packed) for dim in (128, 64)),
    ):
        equal = len(set(lengths)) == 1
        checked, bench = DenseBench(CHECKED, dim), DenseBench(lengths, dim)
        forward, backward = flash.forward_config(bench.query), flash.backward_config(bench.query)
        for one in (checked, bench):
            one.forward(forward)
            one.backward(*backward)
        exact = checked.exact()
        rivals = bench.cudnn_us() if equal else None
        heads = f"{bench.heads}/{bench.kv_heads} heads d={dim} causal"
        shape = (
            f"B={len(lengths)} S={lengths[0]} {heads}" if equal else f"16 documents of 64 to 2048, {heads}"
        )
        cost = bench.work(False)
        goal = (dim, lengths[0]) == (128, 16384)
        yield KernelRow(
            "flash_attention", shape, cost, eager_us(lambda: bench.forward(forward)),
            {"cuDNN": rivals[0]} if rivals else {}, config=str(forward),
            error=relative_error(checked.out, exact[0]), must_us=cost.flops / 450e6 if goal else None,
            aim_us=cost.flops / 600e6 if goal else None,
        )  # fmt: skip
        yield KernelRow(
            "flash_attention backward", shape, bench.work(True), eager_us(lambda: bench.backward(*backward)),
            {"cuDNN": rivals[1]} if rivals else {}, config=str(backward),
            error=max(relative_error(g, e) for g, e in zip(checked.grads, exact[1:], strict=True)),
        )  # fmt: skip
