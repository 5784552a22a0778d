"""Benchmark and tuner of the mixture of experts, on Qwen3-30B-A3B's layers; `cumulo bench kernels` runs them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import torch
from torch import Tensor

from cumulo.kernels.cuda.moe.moe import (
    GroupedConfig,
    MoEBuffers,
    mixture,
    reference,
    shape_class,
    work,
)
from cumulo.kernels.cuda.timing import graph_us
from cumulo.kernels.cuda.work import KernelRow
from cumulo.spec.model import MoESpec

_TUNED_TOKENS = (64, 256, 512, 8192)


def tune() -> dict[str, list[dict[str, int]]]:
    """The fastest tiles by shape class, on the present device, for Qwen3-30B-A3B's layers; `use` takes them."""
    found: dict[str, list[dict[str, int]]] = {}
    moe, hidden, inputs = _bench_layer()
    _compile_all(moe, hidden, inputs)
    for tokens in _TUNED_TOKENS:
        x, router, gate_up, down = inputs(tokens)
        buffers = MoEBuffers(moe, hidden, tokens, torch.bfloat16, x.device)
        residual = torch.zeros_like(x)
        best: tuple[GroupedConfig, GroupedConfig] | None = None
        best_us = float("inf")
        for pair in _candidates(tokens):
            try:
                us = graph_us(
                    lambda i: mixture(x, router, gate_up, down, buffers, residual, configs=pair),
                    repeats=8,
                    rounds=3,
                )
            except Exception as error:
                print(f"moe T={tokens} {pair[0]}: {type(error).__name__}")
                continue
            if us < best_us:
                best, best_us = pair, us
        if best is None:
            continue
        choices = tokens * moe.experts_per_token
        key = shape_class(choices, moe.experts)
        found[key] = [asdict(config) for config in best]
        floor = work(tokens, hidden, moe).floor_us(4.3e12, 690e12)
        print(f"moe T={tokens}, {key}: {best_us:.1f} us, {100 * floor / best_us:.0f}% of roofline: {best}")
    return found


def _compile_all(
    moe: MoESpec, hidden: int, inputs: Callable[[int], tuple[Tensor, Tensor, Tensor, Tensor]]
) -> None:
    """Compile every candidate first, many at a time: one after the other would take longer than the timing."""

    def once(tokens: int, pair: tuple[GroupedConfig, GroupedConfig]) -> None:
        x, router, gate_up, down = inputs(tokens)
        buffers = MoEBuffers(moe, hidden, tokens, torch.bfloat16, x.device)
        mixture(x, router, gate_up, down, buffers, torch.zeros_like(x), configs=pair)

    with ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(once, tokens, pair) for tokens in _TUNED_TOKENS for pair in _candidates(tokens)]
        for job in jobs:
            job.exception()  # shows again, and is reported, when it is timed
    torch.cuda.synchronize()


def _candidates(tokens: int) -> list[tuple[GroupedConfig, GroupedConfig]]:
    """Pairs for the first and the second product; the second has no SwiGLU and so room for twice the columns."""
    return [
        (
            GroupedConfig(rows, columns, depth, warps, stages),
            GroupedConfig(rows, min(128, 2 * columns), depth, warps, stages),
        )
        for rows, columns, depth, warps, stages in _tiles(tokens)
    ]


def _tiles(tokens: int) -> list[tuple[int, int, int, int, int]]:
    if tokens <= 512:
        rows = {64: 16, 256: 32, 512: 64}[tokens]
        return [
            (rows, 64, 64, 4, 4), (rows, 32, 128, 4, 4), (rows, 64, 128, 4, 3), (rows, 64, 64, 4, 5),
            (max(16, rows // 2), 64, 64, 4, 4), (rows, 128, 64, 8, 4),
        ]  # fmt: skip
    return [
        (128, 64, 64, 4, 4),
        (128, 64, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (64, 128, 64, 4, 4),
        (128, 64, 64, 8, 3),
    ]


def _bench_layer():  # type: ignore[no-untyped-def]
    moe, hidden = MoESpec(experts=128, experts_per_token=8, expert_hidden=768), 2048
    gate_up = torch.randn(128, 1536, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    down = torch.randn(128, hidden, 768, device="cuda", dtype=torch.bfloat16) * 768**-0.5
    router = torch.randn(128, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5

    def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16), router, gate_up, down

    return moe, hidden, inputs


def bench_rows() -> Iterator[KernelRow]:
    moe, hidden, inputs = _bench_layer()
    for tokens in (1, 64, 512, 8192):
        x, router, gate_up, down = inputs(tokens)
        buffers = MoEBuffers(moe, hidden, tokens, torch.bfloat16, x.device)
        residual = torch.zeros_like(x)
        found = mixture(x, router, gate_up, down, buffers, torch.zeros_like(x))[:4]
        wide = [tensor.float() for tensor in (x[:4], router, gate_up, down)]
        exact = reference(wide[0], wide[1], wide[2], wide[3], moe)
        yield KernelRow(
            "mixture of experts", f"T={tokens} 128 experts, 8 each, 2048x768", work(tokens, hidden, moe),
            graph_us(lambda i: mixture(x, router, gate_up, down, buffers, residual), repeats=8),
            error=float((found.float() - exact).norm() / exact.norm()),
        )  # fmt: skip
