"""The batch-invariant product whole and in four parts, as ranks need it: the same bits for every number of rows and
over two ranks, and its time. On a GPU:

    python benchmarks/gpu_invariant_parts.py
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

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
    for rows in (1, 3, 64, 65, 200, 257, 700):
        same = torch.equal(invariant_matmul(x[:rows], weight, parts=4), whole[:rows])
        assert same, f"{n} x {k}: {rows} rows have other bits than 2048"
    for rows in (8, 2048):
        same = torch.equal(over_two_ranks(x[:rows], weight), whole[:rows])
        assert same, f"{n} x {k}, {rows} rows: two ranks have other bits than one"
    exact = x[:256].double() @ weight.double().t()
    error = float((whole[:256].double() - exact).norm() / exact.norm())
    print(f"{n} x {k}: same bits for all rows and over two ranks, relative error {error:.1e}", flush=True)


def measure(n: int, k: int, rows: int) -> None:
    copies = max(2, PAST_CACHE // (n * k))
    weights, x, stream = [random(n, k) for _ in range(copies)], random(rows, k), random(rows, n)

    def apart(index: int) -> None:
        torch.add(stream, invariant_matmul(x, weights[index]), out=stream)

    def in_parts(index: int) -> None:
        invariant_matmul(x, weights[index], stream, residual=stream, parts=4)

    whole_us, parts_us = (graph_us(one, copies, rounds=5) for one in (apart, in_parts))
    print(f"{n} x {k}, {rows:4} rows: {whole_us:6.1f} us whole, {parts_us:6.1f} us in four parts", flush=True)


def main() -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        check(*shape)
    for shape in SHAPES:
        for rows in (1, 64, 256, 512, 2048):
            measure(*shape, rows)


if __name__ == "__main__":
    main()
