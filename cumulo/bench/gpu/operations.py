"""Rows of `cumulo bench kernels` for norms, rotation, activations, quantisation, draws, the loss and experts."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.bench.gpu.timing import KernelRow, Work, copies_past_cache, eager_us, randn, relative_error, timed
from cumulo.kernels.cuda.elementwise import rms_norm, rope_cache, swiglu
from cumulo.kernels.cuda.linear import fp8, fp8_blocks, fp8_pair
from cumulo.kernels.cuda.loss.linear_cross_entropy import linear_cross_entropy
from cumulo.kernels.cuda.moe import moe
from cumulo.kernels.cuda.sampling import sample as draws
from cumulo.kernels.cuda.sampling.sample_cuts import CutBuffers, sample_with_cuts
from cumulo.spec.model import MoESpec

VOCABULARY = 151_936
EXPERTS, HIDDEN = MoESpec(experts=128, experts_per_token=8, expert_hidden=768), 2048  # Qwen3-30B-A3B's layers


def norm_rows() -> Iterator[KernelRow]:
    for rows, size in ((256, 1024), (8192, 1024), (8192, 4096)):
        copies = copies_past_cache(rows * size * 8)
        x, residual = ([randn(rows, size) for _ in range(copies)] for _ in range(2))
        weight = torch.rand(size, device="cuda", dtype=torch.bfloat16) + 0.5
        out = torch.empty_like(x[0])
        exact = rms_norm.reference(x[0].double(), weight.double(), 1e-6, residual[0].double())
        error = relative_error(rms_norm.rms_norm(x[0], weight, 1e-6, residual[0].clone()), exact)
        yield timed(
            "rms_norm + residual", f"{rows}x{size}", Work(8 * rows * size, 4 * rows * size),
            lambda i: rms_norm.rms_norm(x[i], weight, 1e-6, residual[i], out=out), copies,
            {"torch (add, then rms_norm)": lambda i: F.rms_norm(x[i].add_(residual[i]), (size,), weight, 1e-6)},
            error=error,
        )  # fmt: skip


def rope_rows() -> Iterator[KernelRow]:
    for tokens, heads, kv_heads, normed in ((1, 16, 8, True), (256, 16, 8, True), (8192, 32, 8, False)):
        dim, blocks, size = 128, max(4, tokens // 32), 64
        width = (heads + 2 * kv_heads) * dim
        copies = copies_past_cache(tokens * width * 4, limit=16)
        qkv = [randn(tokens, width) for _ in range(copies)]
        keys = torch.zeros(blocks, kv_heads, size, dim, device="cuda", dtype=torch.bfloat16)
        values = torch.zeros_like(keys)
        angles = torch.arange(blocks * size, device="cuda")[:, None] * torch.rand(dim // 2, device="cuda")
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        slots = torch.randperm(blocks * size, device="cuda")[:tokens].int()
        norm = torch.rand(dim, device="cuda", dtype=torch.bfloat16) + 0.5 if normed else None
        wide = None if norm is None else norm.double()
        exact = rope_cache.reference(
            qkv[0].double(), cos.double(), sin.double(), slots, heads, kv_heads, wide, wide, 1e-6
        )
        first = qkv[0].clone()
        rope_cache.rope_cache(first, cos, sin, slots, slots, keys, values, heads, norm, norm, 1e-6)
        found = first.view(tokens, -1, dim)[:, :heads]
        yield timed(
            "rope + norm + pages" if normed else "rope + pages", f"T={tokens} {heads}/{kv_heads} heads d={dim}",
            Work(4 * tokens * width, 6 * tokens * (heads + kv_heads) * dim),
            lambda i: rope_cache.rope_cache(
                qkv[i], cos, sin, slots, slots, keys, values, heads, norm, norm, 1e-6
            ), copies, error=relative_error(found, exact[0]),
        )  # fmt: skip


def rotate_rows() -> Iterator[KernelRow]:
    tokens, heads, kv_heads, dim = 32768, 32, 8, 64
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim)
    angle = torch.rand(tokens, dim // 2, device="cuda") * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    states = qkv.view(tokens, -1, dim)[:, : heads + kv_heads]
    turned = qkv.clone()
    rope_cache.rotate_(turned, cos, sin, heads, kv_heads)
    found = turned.view(tokens, -1, dim)[:, : heads + kv_heads]
    # Before the timed runs turn it on.
    error = relative_error(found, rope_cache.rotate_reference(states.double(), cos.double(), sin.double()))
    moved = tokens * (heads + kv_heads) * dim
    yield timed(
        "rotate", f"{tokens} tokens {heads}/{kv_heads} heads d={dim}", Work(4 * moved, 3 * moved),
        lambda _: rope_cache.rotate_(turned, cos, sin, heads, kv_heads),
        rivals={"torch": lambda _: rope_cache.rotate_reference(states, cos, sin)}, error=error,
    )  # fmt: skip


def swiglu_rows() -> Iterator[KernelRow]:
    for rows, width in ((256, 3072), (8192, 3072), (8192, 14336)):
        copies = copies_past_cache(rows * width * 6, limit=16)
        x = [randn(rows, 2 * width) for _ in range(copies)]
        out = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)
        error = relative_error(swiglu.swiglu(x[0]), swiglu.reference(x[0].double()))
        yield timed(
            "swiglu", f"{rows}x{width}", Work(6 * rows * width, 5 * rows * width),
            lambda i: swiglu.swiglu(x[i], out), copies, {"torch": lambda i: swiglu.reference(x[i])}, error=error,
        )  # fmt: skip


def quantise_rows() -> Iterator[KernelRow]:
    """Activations of an 8B model in 8 bits, and gradients in training: the gate's, and the residual stream's."""
    for tokens, columns in ((256, 4096), (8192, 4096)):
        copies = copies_past_cache(2 * tokens * columns)
        xs = [randn(tokens, columns) for _ in range(copies)]
        norm = randn(columns)
        exact = fp8.reference(xs[0], norm).dequantised()
        yield timed(
            "fp8_quantise", f"rms_norm T={tokens} K={columns}", Work(tokens * columns * 3),
            lambda i: fp8.quantise(xs[i], norm), copies,
            error=relative_error(fp8.quantise(xs[0], norm).dequantised(), exact),
        )  # fmt: skip
    for rows, columns in ((32768, 16384), (32768, 2048)):
        x, numbers = randn(rows, columns), rows * columns
        blocks, pair = fp8_blocks.fp8_blocks(x), fp8_pair.fp8_pair(x)
        yield timed(
            "fp8_blocks", f"{rows}x{columns}", Work(4 * numbers, 4 * numbers), lambda _: fp8_blocks.fp8_blocks(x),
            rivals={"torch": lambda _: fp8_blocks.reference(x)},
            error=relative_error(fp8_blocks.dequantised(blocks.data, blocks.scale), x.float()),
        )  # fmt: skip
        yield timed(
            "fp8_pair", f"{rows}x{columns}", Work(6 * numbers, 2 * numbers), lambda _: fp8_pair.fp8_pair(x),
            rivals={"torch": lambda _: fp8_pair.reference(x)},
            error=relative_error(pair.data.float() * pair.scale, x.float()),
        )  # fmt: skip


def sample_rows() -> Iterator[KernelRow]:
    """Draws from whole vocabularies, and with cuts that people use; the last is the worst there is: flat logits, of
    which top-p keeps most."""
    for rows, spread, temperature, top_k, top_p, min_p, must_us in (
        (1, 3.0, 1.0, 0, 1.0, 0.0, None),
        (512, 3.0, 1.0, 0, 1.0, 0.0, None),
        (1, 3.0, 0.6, 20, 0.95, 0.0, 60.0),
        (512, 3.0, 0.6, 20, 0.95, 0.0, 1000.0),
        (512, 3.0, 0.6, 0, 0.95, 0.05, None),
        (1, 1.0, 1.0, 0, 0.95, 0.0, None),
    ):
        copies = copies_past_cache(rows * VOCABULARY * 2, limit=16)
        logits = [randn(rows, VOCABULARY, std=spread) for _ in range(copies)]
        words = torch.zeros((rows, draws.COLUMNS), dtype=torch.int32, device="cuda")
        for column, value in ((draws.TEMPERATURE, temperature), (draws.TOP_P, top_p), (draws.MIN_P, min_p)):
            words[:, column] = torch.full((rows,), value, device="cuda").view(torch.int32)
        words[:, draws.TOP_K] = top_k
        words[:, draws.SLOT] = words[:, draws.SEED_LOW] = torch.arange(rows, device="cuda")
        shared = draws.SampleBuffers(rows, VOCABULARY, logits[0].device)
        cuts = CutBuffers(rows, VOCABULARY, logits[0].device)
        picked = torch.full((rows,), -9, dtype=torch.int32, device="cuda")
        tokens = torch.zeros((rows, 4), dtype=torch.int32, device="cuda")
        whole = top_p == 1.0

        def ours(i: int) -> None:
            if whole:
                draws.sample(logits[i], words, shared, picked, tokens)
            else:
                sample_with_cuts(logits[i], words, shared, cuts, picked, tokens)

        def rival(i: int) -> Tensor:
            return _torch_draw(logits[i], temperature, top_k, top_p, min_p)

        cut = "whole vocabulary" if whole else f"k={top_k} p={top_p} min_p={min_p}{' flat' * (spread == 1)}"
        yield timed(
            "sample", f"R={rows} V={VOCABULARY} T={temperature} {cut}",
            Work(rows * VOCABULARY * 2, 3 * rows * VOCABULARY), ours, copies,
            {"torch (sort or topk, multinomial's exponential trick)": rival}, must_us=must_us,
        )  # fmt: skip


def _torch_draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The same distribution by torch's operators, in the order most engines use."""
    scaled = logits.float() / temperature
    if top_p < 1.0:
        scaled, tokens = scaled.topk(top_k, -1) if top_k else scaled.sort(-1, descending=True)
    probabilities = scaled.softmax(-1)
    if top_p < 1.0:
        cut = probabilities.cumsum(-1) - probabilities >= top_p
        probabilities = probabilities.masked_fill(cut | (probabilities < min_p * probabilities[:, :1]), 0.0)
    chosen = probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
    return tokens.gather(-1, chosen) if top_p < 1.0 else chosen


def loss_rows() -> Iterator[KernelRow]:
    """Forward and backward of the last layer of a 1.24B and an 8B model, beside plain torch."""
    for rows, vocabulary, hidden in ((8192, 128256, 2048), (8192, 128256, 4096), (16384, 49152, 576)):
        leaves = [
            one.requires_grad_() for one in (randn(rows, hidden), randn(vocabulary, hidden, std=hidden**-0.5))
        ]
        targets = torch.randint(0, vocabulary, (rows,), device="cuda")

        def ours() -> tuple[Tensor, ...]:
            return torch.autograd.grad(linear_cross_entropy(leaves[0], leaves[1], targets), leaves)

        def plain() -> tuple[Tensor, ...]:
            loss = F.cross_entropy(F.linear(*leaves).float(), targets, reduction="sum")
            return torch.autograd.grad(loss, leaves)

        error = max(
            relative_error(found, exact.float()) for found, exact in zip(ours(), plain(), strict=True)
        )
        # Logits once in forward, and twice in backward, for both gradients.
        work = Work(4 * hidden * (rows + vocabulary), 6 * rows * vocabulary * hidden)
        yield KernelRow(
            "linear_cross_entropy", f"{rows} tokens, {vocabulary} words, hidden {hidden}, with gradients", work,
            eager_us(ours, 5), {"torch": eager_us(plain, 5)}, error=error,
        )  # fmt: skip


class ExpertLayer:
    """A mixture's weights on the GPU, and its sums for random tokens."""

    def __init__(self) -> None:
        count, width = EXPERTS.experts, EXPERTS.expert_hidden
        self.weights = (
            randn(count, HIDDEN, std=HIDDEN**-0.5),
            randn(count, 2 * width, HIDDEN, std=HIDDEN**-0.5),
            randn(count, HIDDEN, width, std=width**-0.5),
        )

    def inputs(self, tokens: int) -> tuple[Tensor, moe.MoEBuffers]:
        x = randn(tokens, HIDDEN)
        return x, moe.MoEBuffers(EXPERTS, HIDDEN, tokens, torch.bfloat16, x.device)


def moe_rows() -> Iterator[KernelRow]:
    layer = ExpertLayer()
    for tokens in (1, 64, 512, 8192):
        x, buffers = layer.inputs(tokens)
        residual = torch.zeros_like(x)
        found = moe.mixture(x, *layer.weights, buffers, torch.zeros_like(x))[:4]
        router, gate_up, down = (one.float() for one in layer.weights)
        exact = moe.reference(x[:4].float(), router, gate_up, down, EXPERTS)
        yield timed(
            "mixture of experts", f"T={tokens} 128 experts, 8 each, 2048x768", expert_work(tokens),
            lambda _: moe.mixture(x, *layer.weights, buffers, residual), repeats=8,
            error=relative_error(found, exact),
        )  # fmt: skip


def expert_work(tokens: int) -> Work:
    """The weights of the experts that are hit if routing is even, and their products."""
    share = EXPERTS.experts_per_token / EXPERTS.experts
    hit = EXPERTS.experts * (1 - (1 - share) ** tokens)
    numbers = 3 * HIDDEN * EXPERTS.expert_hidden
    return Work(int(2 * hit * numbers), 2 * tokens * EXPERTS.experts_per_token * numbers)
