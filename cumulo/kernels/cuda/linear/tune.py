"""linear_tune: time every kernel that could do a model's products and keep the winners for `linear`.

`python -m cumulo.kernels.cuda.linear.tune WINNERS.json [--kinds bf16,fp8,w4] [--rows 1,2,4,...]` on the device.
What is timed is the call the decoder makes, with its norm, residual and SwiGLU, in a CUDA graph, on weights that
are not in the cache. Kernels are compiled first, by several processes at once, into Triton's cache on disk: the
engine finds them there too.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cumulo.kernels.cuda.linear import few_linear, skinny_linear, small_linear, w4, w4_dot
from cumulo.kernels.cuda.linear import linear as door
from cumulo.kernels.cuda.linear.fp8 import Fp8Weight
from cumulo.kernels.cuda.linear.linear import (
    ROW_CLASSES,
    Choice,
    Weight,
    linear,
    save_winners,
    shape_key,
)
from cumulo.kernels.cuda.linear.small_linear import random_bf16
from cumulo.kernels.cuda.linear.w4_weight import W4Weight
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us

GROUP = 128


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a model: its weight's shape and what comes with it in a step."""

    name: str
    n: int
    k: int
    norm: bool = False
    residual: bool = False
    swiglu: bool = False


def products(
    name: str, hidden: int, qkv: int, attention: int, ffn: int | None, vocabulary: int
) -> list[Product]:
    """The products of a decoder's step; without `ffn`, of a mixture's, whose experts are not `linear`'s."""
    found = [
        Product(f"{name} qkv", qkv, hidden, norm=True),
        Product(f"{name} o", hidden, attention, residual=True),
        Product(f"{name} head", vocabulary, hidden),
    ]
    if ffn is not None:
        found[2:2] = [
            Product(f"{name} gate/up", 2 * ffn, hidden, norm=True, swiglu=True),
            Product(f"{name} down", hidden, ffn, residual=True),
        ]
    return found


MODELS = {
    "Qwen3-0.6B": products("Qwen3-0.6B", 1024, 4096, 2048, 3072, 151936),
    "Llama-3.1-8B": products("Llama-3.1-8B", 4096, 6144, 4096, 14336, 128256),
    "Qwen3-30B-A3B": products("Qwen3-30B-A3B", 2048, 5120, 4096, None, 151936),
    "SmolLM2-135M": products("SmolLM2-135M", 576, 960, 576, 1536, 49152),
    # Of a head that drafts for it, what is not a product of the model's, too.
    "SmolLM2-135M's head": [
        Product("SmolLM2-135M's head fc", 576, 1728),
        Product("SmolLM2-135M's head logits", 12288, 576, norm=True),
    ],
    "Llama-3.1-8B's head": [
        Product("Llama-3.1-8B's head fc", 4096, 12288),
        Product("Llama-3.1-8B's head logits", 32000, 4096, norm=True),
    ],
}


def candidates(product: Product, m: int, kind: str) -> list[Choice]:
    """Everything worth timing at this shape, the library first."""
    found = [Choice("library")]
    n, k, swiglu = product.n, product.k, product.swiglu
    if kind == "w4":
        dots = w4_dot.takes(m, k)
        most = 8 if dots else (None if m < 128 else 4)
        found += [Choice("w4", config) for config in w4.candidates(m, n, k, GROUP, swiglu)[:most]]
        if dots:
            found += [Choice("w4 dot", config) for config in w4_dot.candidates(k)]
        return found
    small_matrix = n * k <= few_linear.SMALL_MATRIX * (2 if m == 1 else 1)
    few = kind == "bf16" and m <= few_linear.MAX_ROWS and small_matrix
    if few:
        found += [Choice("few", config) for config in few_linear.candidates(m, n, k, swiglu)]
    if m <= small_linear.MAX_ROWS and not (few and m > 1):
        default = small_linear.default_config(n, k, swiglu, 1 if kind == "fp8" else 2)
        configs = dict.fromkeys((default, *small_linear.CANDIDATES[: None if m <= 2 else 5]))
        # Tiles wider than a row are mostly mask.
        found += [
            Choice("small", replace(config, early=early))
            for config in configs
            if config.block_k < 2 * k
            for early in ((False, True) if m == 1 and small_matrix else (False,))
        ]
    if m > 1:  # one row needs no tensor cores
        configs_skinny = skinny_linear.candidates(m, n, k, swiglu, 1 if kind == "fp8" else 2)
        found += [Choice("skinny", config) for config in configs_skinny[: None if m < 128 else 6]]
    return found


def _weight(
    product: Product, kind: str, device: torch.device | str, generator: torch.Generator | None
) -> Weight:
    if generator is None:
        plain = torch.ones(product.n, product.k, dtype=torch.bfloat16, device=device)
    else:
        plain = random_bf16(product.n, product.k, device=device, generator=generator, std=product.k**-0.5)
    if kind == "fp8":
        return Fp8Weight.quantised(plain)
    return W4Weight.quantised(plain, GROUP) if kind == "w4" else plain


def _copy(weight: Weight) -> Weight:
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(weight.data.clone(), weight.scales.clone())
    if isinstance(weight, W4Weight):
        return W4Weight(weight.words.clone(), weight.scales.clone(), weight.minimums, weight.group)
    return weight.clone()


@dataclass(slots=True)
class TunedCall:
    """The decoder's call of one product, on buffers of its own."""

    product: Product
    x: Tensor
    norm: Tensor | None
    out: Tensor

    @classmethod
    def random(
        cls, product: Product, m: int, device: torch.device | str, generator: torch.Generator
    ) -> "TunedCall":
        outputs = product.n // 2 if product.swiglu else product.n
        return cls(
            product,
            random_bf16(m, product.k, device=device, generator=generator),
            random_bf16(product.k, device=device, generator=generator) if product.norm else None,
            torch.zeros(m, outputs, dtype=torch.bfloat16, device=device),
        )

    def __call__(self, weight: Weight) -> Tensor:
        return linear(
            self.x,
            weight,
            self.out,
            norm_weight=self.norm,
            residual=self.out if self.product.residual else None,
            swiglu=self.product.swiglu,
        )


def _compile(task: tuple[Product, str, list[tuple[int, Choice]]]) -> int:
    """In a process of its own: run every candidate of one product once. What the device refuses is skipped."""
    product, kind, choices = task
    narrow = Product(
        product.name, min(product.n, 4096), product.k, product.norm, product.residual, product.swiglu
    )
    weight = _weight(narrow, kind, "cuda", None)
    generator = torch.Generator("cuda").manual_seed(0)
    compiled = 0
    for m, choice in choices:
        door.WINNERS[shape_key(m, narrow.n, narrow.k, door.kind_of(weight), narrow.swiglu)] = choice
        try:
            TunedCall.random(narrow, m, "cuda", generator)(weight)
            torch.cuda.synchronize()
            compiled += 1
        except Exception:  # shared memory or registers; the timing run says so by its name
            continue
    return compiled


def compile_all(work: Sequence[tuple[Product, str]], rows: Sequence[int], processes: int) -> int:
    """Fill Triton's cache on disk; kernels that shapes share are compiled once."""
    tasks, seen = [], set()
    for product, kind in work:
        fresh = []
        for m in rows:
            for choice in candidates(product, m, kind):
                fusions = (product.norm, product.residual, product.swiglu)
                by_length = choice.kernel in (
                    "small",
                    "few",
                    "w4 dot",
                )  # compiled for each number of rows and each k
                height = m if by_length else max(8, 1 << (m - 1).bit_length())
                key = (kind, choice, height, product.k if by_length else 0, fusions)
                if choice.kernel != "library" and key not in seen:
                    seen.add(key)
                    fresh.append((m, choice))
        tasks += [(product, kind, fresh[i : i + 8]) for i in range(0, len(fresh), 8)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return sum(pool.map(_compile, tasks))


def tune(
    device: torch.device | str = "cuda",
    models: Sequence[str] = tuple(MODELS),
    kinds: Sequence[str] = ("bf16",),
    rows: Sequence[int] = ROW_CLASSES,
    seconds: float = 120.0,
) -> dict[str, Choice]:
    """Fill `linear.WINNERS` for these models and print a line a shape; stops at a shape's end when time is up."""
    start = time.monotonic()
    work = [(product, kind) for kind in kinds for name in models for product in MODELS[name]]
    compiled = compile_all(work, rows, max(1, min(14, (os.cpu_count() or 2) - 1)))
    print(f"{compiled} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    generator = torch.Generator(device).manual_seed(0)
    for product, kind in work:
        first = _weight(product, kind, device, generator)
        nbytes = first.nbytes
        weights = [first] + [_copy(first) for _ in range(copies_past_cache(nbytes, limit=32) - 1)]
        for m in rows:
            if time.monotonic() - start > seconds:
                print(f"time is up at {product.name} {kind} m={m}; the rest follows the defaults", flush=True)
                return door.WINNERS
            print(_tune_one(product, kind, m, weights, device, generator), flush=True)
        del weights, first
    return door.WINNERS


def _tune_one(
    product: Product,
    kind: str,
    m: int,
    weights: Sequence[Weight],
    device: torch.device | str,
    generator: torch.Generator,
) -> str:
    """Time the candidates at one shape, keep the winner, and say what it reached."""
    key = shape_key(m, product.n, product.k, door.kind_of(weights[0]), product.swiglu)
    call = TunedCall.random(product, m, device, generator)
    times: dict[Choice, float] = {}
    refused = 0
    for choice in candidates(product, m, kind):
        door.WINNERS[key] = choice
        try:
            times[choice] = graph_us(lambda i: call(weights[i]), len(weights), rounds=5)
        except Exception:  # too much shared memory or too many registers for this device
            refused += 1
    best = min(times, key=lambda choice: times[choice])
    door.WINNERS[key] = best
    us = times[best]
    return (
        f"{product.name:22} {kind:5} m={m:<4} {us:7.1f} us {weights[0].nbytes / us / 1e6:5.2f} TB/s  "
        f"library {times.get(Choice('library'), float('nan')):7.1f}  {best.kernel} {best.config or ''}"
        f"{f'  ({refused} refused)' if refused else ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="time the products of decoders on this GPU and keep the winners"
    )
    parser.add_argument("path", help="where the table goes, as JSON")
    parser.add_argument("--kinds", default="bf16", help="bf16, fp8, w4, separated by commas")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default=",".join(map(str, ROW_CLASSES)))
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    tune(
        "cuda",
        given.models.split(","),
        given.kinds.split(","),
        [int(m) for m in given.rows.split(",")],
        given.seconds,
    )
    save_winners(given.path)


if __name__ == "__main__":
    main()
