"""Rows of `cumulo bench kernels` for products with weights: as the decoder asks for them, by the winners of the
table, against the vendor's library."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from cumulo.bench.gpu.timing import KernelRow, Work, copies_past_cache, randn, relative_error, timed
from cumulo.kernels.cuda.linear.fp8 import Fp8Weight
from cumulo.kernels.cuda.linear.invariant_matmul import invariant_matmul
from cumulo.kernels.cuda.linear.linear import choose, linear, prepare
from cumulo.kernels.cuda.linear.product import Weight
from cumulo.kernels.cuda.linear.w4_weight import W4Weight

# The decode products of two models, and what a plain tuned kernel reached on an H200 (µs, one row).
SHAPES = (
    ("Qwen3-0.6B qkv", 4096, 1024, 4.1),
    ("Qwen3-0.6B o", 1024, 2048, 3.2),
    ("Qwen3-0.6B gate/up", 6144, 1024, 5.1),
    ("Qwen3-0.6B down", 1024, 3072, 3.7),
    ("Qwen3-0.6B head", 151936, 1024, 73.7),
    ("Llama-8B qkv", 6144, 4096, 13.7),
    ("Llama-8B o", 4096, 4096, 10.0),
    ("Llama-8B gate/up", 28672, 4096, 55.9),
    ("Llama-8B down", 4096, 14336, 29.5),
)


def weight_of(plain: Tensor, kind: str) -> Weight:
    """A matrix as bf16, fp8 or w4."""
    if kind == "bf16":
        return plain
    return Fp8Weight.quantised(plain) if kind == "fp8" else W4Weight.quantised(plain)


def copy_of(weight: Weight) -> Weight:
    """The same numbers elsewhere in memory."""
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(weight.data.clone(), weight.scales.clone())
    if isinstance(weight, W4Weight):
        return W4Weight(weight.words.clone(), weight.scales.clone())
    return weight.clone()


def linear_rows() -> Iterator[KernelRow]:
    prepare("cuda")
    for kind, rows in (("bf16", (1, 4, 16, 64)), ("fp8", (1, 16, 64, 256, 2048)), ("w4", (1, 4, 16, 64))):
        for name, n, k, must_us in SHAPES:
            if kind != "bf16" and not name.startswith("Llama"):
                continue
            plain = randn(n, k, std=k**-0.5)
            first = weight_of(plain, kind)
            copies = copies_past_cache(first.nbytes)
            weights = [first] + [copy_of(first) for _ in range(copies - 1)]
            exact_weight = (first if isinstance(first, Tensor) else first.dequantised()).double()
            for m in rows:
                x = randn(m, k)
                out = linear(x, first)
                must = {"bf16": must_us, "fp8": n * k / 3.6e6}.get(kind)
                yield timed(
                    "linear" if kind == "bf16" else f"linear {kind}", f"{name} m={m} n={n} k={k}",
                    Work(first.nbytes + 2 * m * (k + n), 2 * m * n * k), lambda i: linear(x, weights[i], out),
                    copies, {"cuBLAS, bfloat16": lambda _: F.linear(x, plain)},
                    dtype="float8_e4m3fn" if kind == "fp8" and m > 64 else "bfloat16",
                    config=str(choose(m, first)), must_us=must if m == 1 else None,
                    error=relative_error(out[:64], x[:64].double() @ exact_weight.t()),
                )  # fmt: skip


def invariant_rows() -> Iterator[KernelRow]:
    """Against the library, which is free to choose by shape; the large ones must reach 400 TFLOP/s."""
    for m, n, k in ((64, 4096, 4096), (4096, 4096, 4096), (8192, 28672, 4096)):
        x, weight = randn(m, k), randn(n, k, std=k**-0.5)
        out = invariant_matmul(x, weight)
        yield timed(
            "invariant_matmul", f"m={m} n={n} k={k}", Work(2 * (m * k + n * k + m * n), 2 * m * n * k),
            lambda _: invariant_matmul(x, weight, out), rivals={"cuBLAS": lambda _: F.linear(x, weight)},
            repeats=5, error=relative_error(out[:128], x[:128].double() @ weight.double().t()),
            must_us=2 * m * n * k / 400e6 if m >= 4096 else None,
        )  # fmt: skip
