"""`cumulo bench kernels --tune`: measure which kernels and tiles win on the present GPU, and keep the table that
the decoder loads there (kernels/cuda/registry.py).

What is timed of products is the call the decoder makes, with its norm, residual and SwiGLU, in a CUDA graph, on
weights that are not in the cache.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from cumulo.bench.gpu import attention
from cumulo.bench.gpu.operations import EXPERTS, ExpertLayer
from cumulo.bench.gpu.products import copy_of, weight_of
from cumulo.bench.gpu.timing import copies_past_cache, eager_us, graph_us, randn, relative_error
from cumulo.kernels.cuda import registry
from cumulo.kernels.cuda.attention import flash_attention as flash
from cumulo.kernels.cuda.attention.config import chunk_key, decode_key
from cumulo.kernels.cuda.attention.flash_attention_backward import BackwardConfig
from cumulo.kernels.cuda.attention.flash_attention_forward import ForwardConfig
from cumulo.kernels.cuda.attention.paged_attention_chunk import ChunkConfig
from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig
from cumulo.kernels.cuda.captured import compiling_ahead
from cumulo.kernels.cuda.linear import few_dot, skinny_linear, small_linear, w4, w4_dot
from cumulo.kernels.cuda.linear import linear as products
from cumulo.kernels.cuda.linear.linear import ROW_CLASSES, Choice, linear, shape_key
from cumulo.kernels.cuda.linear.product import SMALL_MATRIX, Weight
from cumulo.kernels.cuda.moe import moe

Config = TypeVar("Config")
Tell = Callable[[str], None]
MAX_ERROR = 2e-2


def fastest(candidates: Iterable[Config], us: Callable[[Config], float]) -> tuple[Config, float, int]:
    """The quickest of several ways to do the same, its time, and how many of them the device refuses."""
    times: dict[Config, float] = {}
    refused = 0
    for config in candidates:
        try:
            times[config] = us(config)
        except Exception:  # too much shared memory, registers, an unsupported shape
            refused += 1
            torch.cuda.synchronize()
    best = min(times, key=lambda config: times[config])
    return best, times[best], refused


# -- products -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Shape:
    """One product of a model: its weight's shape and what comes with it in a step."""

    name: str
    n: int
    k: int
    norm: bool = False
    residual: bool = False
    swiglu: bool = False


def shapes_of(
    name: str, hidden: int, qkv: int, attention: int, ffn: int | None, vocabulary: int
) -> list[Shape]:
    """The products of a decoder's step; without `ffn`, of a mixture's, whose experts are not `linear`'s."""
    found = [
        Shape(f"{name} qkv", qkv, hidden, norm=True),
        Shape(f"{name} o", hidden, attention, residual=True),
        Shape(f"{name} head", vocabulary, hidden),
    ]
    if ffn is not None:
        found += [
            Shape(f"{name} gate/up", 2 * ffn, hidden, norm=True, swiglu=True),
            Shape(f"{name} down", hidden, ffn, residual=True),
        ]
    return found


# Weights, and the models whose products have them.
MODELS: dict[str, tuple[list[Shape], ...]] = {
    "bf16": (
        shapes_of("Qwen3-0.6B", 1024, 4096, 2048, 3072, 151936),
        shapes_of("Llama-3.1-8B", 4096, 6144, 4096, 14336, 128256),
        shapes_of("Qwen3-30B-A3B", 2048, 5120, 4096, None, 151936),
        shapes_of("SmolLM2-135M", 576, 960, 576, 1536, 49152),
        # Of heads that draft for them, what is not a product of the models', too.
        [Shape("SmolLM2's head fc", 576, 1728), Shape("SmolLM2's head logits", 12288, 576, norm=True)],
        [Shape("Llama's head fc", 4096, 12288), Shape("Llama's head logits", 32000, 4096, norm=True)],
    ),
    "fp8": (shapes_of("Llama-3.1-8B", 4096, 6144, 4096, 14336, 128256),),
    "w4": (shapes_of("Llama-3.1-8B", 4096, 6144, 4096, 14336, 128256),),
}


def candidates(shape: Shape, m: int, kind: str) -> list[Choice]:
    """Everything worth timing at this shape, the library first."""
    found = [Choice("library")]
    n, k, swiglu = shape.n, shape.k, shape.swiglu
    element_bytes = 1 if kind == "fp8" else 2
    if kind == "w4":
        dots = w4_dot.takes(m, k)
        most = 8 if dots else (None if m < 128 else 4)
        found += [Choice("w4", config) for config in w4.candidates(m, n, k, swiglu)[:most]]
        return found + ([Choice("w4 dot", config) for config in w4_dot.candidates(k)] if dots else [])
    small_matrix = n * k <= SMALL_MATRIX * (2 if m == 1 else 1)
    if kind == "bf16" and small_matrix and few_dot.takes(m, k):
        found += [Choice("dot", config) for config in few_dot.candidates(m, n, k, swiglu)]
    if m <= small_linear.MAX_ROWS:
        default = small_linear.default_config(n, k, swiglu, element_bytes)
        configs = dict.fromkeys((default, *small_linear.CANDIDATES[: None if m <= 2 else 5]))
        found += [
            Choice("small", replace(config, early=early))
            for config in configs
            if config.block_k < 2 * k  # tiles wider than a row are mostly mask
            for early in ((False, True) if m == 1 and small_matrix else (False,))
        ]
    if m > 1:  # one row needs no tensor cores
        tiles = skinny_linear.candidates(m, n, k, swiglu, element_bytes)
        found += [Choice("skinny", config) for config in tiles[: None if m < 128 else 6]]
    return found


def tune_products(tell: Tell) -> dict[str, Any]:
    for kind, models in MODELS.items():
        for shape in [shape for model in models for shape in model]:
            first = weight_of(randn(shape.n, shape.k, std=shape.k**-0.5), kind)
            weights = [first, *(copy_of(first) for _ in range(copies_past_cache(first.nbytes, limit=32) - 1))]
            for m in ROW_CLASSES:
                tell(tune_product(shape, kind, m, weights))
    return products.winners()


def tune_product(shape: Shape, kind: str, m: int, weights: Sequence[Weight]) -> str:
    """Time the candidates at one shape, keep the winner, and say what it reached."""
    device = weights[0].device
    x, norm = (torch.randn(*size, device=device).bfloat16() for size in ((m, shape.k), (shape.k,)))
    outputs = shape.n // 2 if shape.swiglu else shape.n
    out = torch.zeros(m, outputs, dtype=torch.bfloat16, device=device)

    def multiply(choice: Choice, weight: Weight) -> Tensor:
        return linear(
            x, weight, out, norm_weight=norm if shape.norm else None, residual=out if shape.residual else None,
            swiglu=shape.swiglu, choice=choice,
        )  # fmt: skip

    choices = candidates(shape, m, kind)
    with suppress(Exception), compiling_ahead():  # what the device refuses shows again when it is timed
        for choice in choices:
            multiply(choice, weights[0])
    best, us, refused = fastest(
        choices,
        lambda choice: graph_us(lambda i: multiply(choice, weights[i]), len(weights), rounds=5),
    )
    key = shape_key(m, shape.n, shape.k, products.kind_of(weights[0]), shape.swiglu)
    products.WINNERS[key] = best
    return (
        f"{shape.name:22} {kind:5} m={m:<4} {us:7.1f} us {weights[0].nbytes / us / 1e6:5.2f} TB/s  "
        f"{best.kernel} {best.config or ''}{f'  ({refused} refused)' if refused else ''}"
    )


# -- attention ------------------------------------------------------------------------------------------------
DECODE_MANY = [
    DecodeConfig(tile, warps, stages, items_per_sm=items, min_tiles=least)
    for tile, warps, stages, items, least in (
        (64, 4, 3, 16, 6), (64, 4, 3, 16, 12), (64, 4, 3, 8, 4), (64, 4, 3, 32, 4), (64, 4, 3, 3, 4),
        (64, 4, 2, 16, 4), (64, 4, 4, 16, 4), (64, 8, 3, 16, 4), (32, 4, 4, 16, 8), (128, 4, 2, 16, 2),
    )
]  # fmt: skip
DECODE_FEW = [
    DecodeConfig(tile, warps, stages, items_per_sm=items, min_tiles=least, merge_registers=registers)
    for tile, warps, stages, items, least, registers in (
        (64, 4, 3, 3, 1, 32), (64, 4, 3, 3, 1, 64), (64, 4, 3, 2, 1, 32), (64, 4, 3, 1, 1, 64),
        (64, 4, 2, 2, 1, 64), (64, 8, 3, 2, 1, 32), (32, 4, 3, 4, 1, 32), (32, 4, 3, 2, 2, 64),
    )
]  # fmt: skip
CHUNK = [
    *(ChunkConfig(128, 64, 8, stages, overlap=tiles) for stages, tiles in ((4, 2), (4, 4), (6, 2), (3, 2))),
    *(ChunkConfig(64, 64, 4, stages, overlap=2) for stages in (3, 2)),
    ChunkConfig(64, 64, 4, 3),
    ChunkConfig(128, 64, 8, 3),
]
STEPS: tuple[tuple[attention.Step, Sequence[DecodeConfig | ChunkConfig]], ...] = (
    (attention.decodes(1, 1024, 32, 8), DECODE_FEW),
    (attention.decodes(1, 1024, 16, 8), DECODE_FEW),
    (attention.decodes(8, 2048, 32, 4), DECODE_FEW),
    (attention.mixed_lengths(256, 100, 2048, 32, 8), DECODE_MANY),
    (attention.mixed_lengths(256, 100, 2048, 16, 8), DECODE_MANY),
    (attention.mixed_lengths(256, 100, 2048, 32, 4), DECODE_MANY),
    (attention.chunk(8000, 8000, 32, 8), CHUNK),
    (attention.chunk(8000, 8000, 16, 8), CHUNK),
    (attention.chunk(8000, 8000, 32, 4), CHUNK),
)


FORWARD = [
    ForwardConfig(128, 128, 8, 2),
    ForwardConfig(128, 64, 8, 2),
    ForwardConfig(128, 64, 8, 3),
    *(ForwardConfig(64, 64, 4, 3, descriptors=descriptors) for descriptors in (True, False)),
]
# Of the kernel that owns keys, and of the one that owns queries.
BACKWARD = [BackwardConfig(128, 64, 8, 2), BackwardConfig(128, 64, 8, 3), BackwardConfig(64, 64, 4, 2)]


def tune_paged_attention(tell: Tell) -> dict[str, Any]:
    found = {}
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    for step, configs in STEPS:
        bench = attention.PagedBench(step)
        name = "decode" if step.decodes else "chunk"
        best, us, _ = fastest(configs, lambda config: bench.us(bench.plan(**{name: config}), rounds=5))
        group, pairs = step.heads // step.kv_heads, len(step.sequences) * step.kv_heads
        key = (
            decode_key(group, step.dim, step.kv_dtype, pairs, multiprocessors)
            if step.decodes
            else chunk_key(group, step.dim, step.kv_dtype, attention.BLOCK_SIZE)
        )
        found[key] = asdict(best)
        tell(f"{key}: {us:.1f} us, {best}")
    return found


def tune_flash_attention(tell: Tell) -> dict[str, Any]:
    """Tiles of our own kernels for packed documents, which are checked before they are timed."""
    for dim in attention.HEADS:
        small, large = attention.DenseBench(attention.CHECKED, dim), attention.DenseBench([8192], dim)
        exact = small.exact()

        def checked(found: Sequence[Tensor], right: Sequence[Tensor]) -> None:
            if not all(relative_error(a, b) < MAX_ERROR for a, b in zip(found, right, strict=True)):
                raise ValueError("the tiles compute something else")

        def forward_us(config: ForwardConfig) -> float:
            small.forward(config)
            checked([small.out], exact[:1])
            return eager_us(lambda: large.forward(config), 5)

        def backward_us(pair: tuple[BackwardConfig, BackwardConfig]) -> float:
            small.backward(*pair)
            checked(small.grads, exact[1:])
            return eager_us(lambda: large.backward(*pair), 5)

        forward, us, _ = fastest(FORWARD, forward_us)
        for one in (small, large):
            one.forward(forward)
        pair, backward, _ = fastest(product(BACKWARD, BACKWARD), backward_us)
        flash.FORWARD[f"d{dim}"], flash.BACKWARD[f"d{dim}"] = forward, pair
        tell(f"d={dim}: forward {us:.0f} us, {forward}; backward {backward:.0f} us, {pair}")
    return flash.winners()


# -- experts --------------------------------------------------------------------------------------------------
def tune_moe(tell: Tell) -> dict[str, Any]:
    """Tiles by how many choices an expert gets on average."""
    layer, found = ExpertLayer(), {}
    for tokens, rows in ((64, 16), (256, 32), (512, 64), (8192, 128)):
        x, buffers = layer.inputs(tokens)
        residual = torch.zeros_like(x)

        def us(pair: tuple[moe.GroupedConfig, moe.GroupedConfig]) -> float:
            return graph_us(
                lambda _: moe.mixture(x, *layer.weights, buffers, residual, configs=pair), repeats=8, rounds=3
            )

        pair, best_us, _ = fastest(_expert_tiles(rows), us)
        key = moe.shape_class(tokens * EXPERTS.experts_per_token, EXPERTS.experts)
        found[key] = [asdict(config) for config in pair]
        tell(f"moe T={tokens}, {key}: {best_us:.1f} us, {pair}")
    return found


def _expert_tiles(rows: int) -> Iterator[tuple[moe.GroupedConfig, moe.GroupedConfig]]:
    """For the first and the second product; the second has no SwiGLU and so room for twice the columns."""
    for columns, depth, warps, stages in (
        (64, 64, 4, 4), (32, 128, 4, 4), (64, 128, 4, 3), (64, 64, 8, 3), (64, 64, 8, 4), (128, 64, 8, 3),
    ):  # fmt: skip
        yield (
            moe.GroupedConfig(rows, columns, depth, warps, stages),
            moe.GroupedConfig(rows, min(128, 2 * columns), depth, warps, stages),
        )


TUNERS: dict[str, Callable[[Tell], dict[str, Any]]] = {
    "paged_attention": tune_paged_attention,
    "linear": tune_products,
    "moe": tune_moe,
    "flash_attention": tune_flash_attention,
}


def tune_all(tell: Tell, only: Sequence[str] = (), path: Path | None = None) -> Path:
    """Measure every table, or those whose name holds one of the words; returns the file that has them.

    It is written after each table, so that none is lost. Tables already in the file stay unless they are measured
    anew. A table that fails is reported and left out.
    """
    name = registry.device_name("cuda")
    path = path or registry.winners_file(name)
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"tables": {}}
    report |= {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    for table, tune in TUNERS.items():
        if only and not any(word in table for word in only):
            continue
        started_s = time.perf_counter()
        try:
            report["tables"][table] = tune(tell)
        except Exception as error:  # one operation's trouble must not cost the others their measurements
            tell(f"{table} failed: {type(error).__name__}: {error}")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
        tell(f"{table}: {time.perf_counter() - started_s:.0f} s, written to {path}")
    return path
