"""The batch-invariant product whole, in four and in eight parts, as ranks need it: the same bits for any number of
rows and over two ranks, and its time next to the library's. On a GPU:

    python benchmarks/gpu_invariant_parts.py
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from cumulo.kernels.cuda.linear.fp8 import Fp8Weight
from cumulo.kernels.cuda.linear.invariant_matmul import invariant_matmul
from cumulo.kernels.cuda.timing import graph_us

SHAPES = ((4096, 14336), (4096, 4096), (1024, 3072))  # n, k
PAST_CACHE = 150_000_000  # numbers of all matrices that take turns


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def over_two_ranks(x: Tensor, weight: Tensor) -> Tensor:
    half = x.shape[1] // 2
    sums = [
        invariant_matmul(x[:, cut], weight[:, cut], torch.empty(len(x), len(weight), device="cuda"), parts=2)
        for cut in (slice(half), slice(half, None))
    ]
    return (sums[0] + sums[1]).bfloat16()


def check(n: int, k: int) -> None:
    x, weight = random(2048, k), random(n, k) * k**-0.5
    whole = invariant_matmul(x, weight, parts=4)
    for rows in (1, 3, 16, 17, 33, 64, 65, 200, 257, 700):
        same = torch.equal(invariant_matmul(x[:rows], weight, parts=4), whole[:rows])
        assert same, f"{n} x {k}: {rows} rows have other bits than 2048"
    for rows in (8, 2048):
        same = torch.equal(over_two_ranks(x[:rows], weight), whole[:rows])
        assert same, f"{n} x {k}, {rows} rows: two ranks have other bits than one"
    exact = x[:256].double() @ weight.double().t()
    error = float((whole[:256].double() - exact).norm() / exact.norm())
    eight = Fp8Weight.quantised(weight)
    whole = invariant_matmul(x, eight.data, scales=eight.scales, parts=4)
    for rows in (1, 16, 33, 64, 65, 257):
        same = torch.equal(invariant_matmul(x[:rows], eight.data, scales=eight.scales, parts=4), whole[:rows])
        assert same, f"{n} x {k} in 8 bits: {rows} rows have other bits than 2048"
    print(f"{n} x {k}: same bits for all rows and over two ranks, relative error {error:.1e}", flush=True)


def measure(n: int, k: int, rows: int) -> None:
    copies = max(2, PAST_CACHE // (n * k))
    weights, x, stream = [random(n, k) for _ in range(copies)], random(rows, k), random(rows, n)

    def apart(index: int) -> None:
        torch.add(stream, invariant_matmul(x, weights[index]), out=stream)

    def in_parts(index: int, parts: int = 4) -> None:
        invariant_matmul(x, weights[index], stream, residual=stream, parts=parts)

    def library(index: int) -> None:
        torch.addmm(stream, x, weights[index].t(), out=stream)

    ways = (library, apart, in_parts, lambda index: in_parts(index, 8))
    library_us, whole_us, four_us, eight_us = (graph_us(one, copies, rounds=5) for one in ways)
    print(
        f"{n} x {k}, {rows:4} rows: library {library_us:6.1f} us; invariant: {whole_us:6.1f} whole, "
        f"{four_us:6.1f} in four parts, {eight_us:6.1f} in eight", flush=True,
    )  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        check(*shape)
    for shape in SHAPES:
        for rows in (1, 16, 64, 256, 512, 2048):
            measure(*shape, rows)


if __name__ == "__main__":
    main()
