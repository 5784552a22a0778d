"""Kernels on the CPU back end next to torch: `rows()`, printed by `python -m cumulo.compile.backend.bench`.

Each row is a ratio of two times of one run, taken in turns, so that a busy machine slows both.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch


def _kernels() -> dict[str, Any]:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def add(x, y, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def softmax(x, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64) * columns
        at = tl.arange(0, BLOCK)
        inside = at < columns
        v = tl.load(x + row + at, mask=inside, other=-float("inf"))
        e = tl.exp(v - tl.max(v, 0))
        tl.store(out + row + at, e / tl.sum(e, 0), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        left, right = a + m[:, None] * K + k[None, :], b + k[:, None] * N + n[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            x = tl.load(left, mask=(m[:, None] < M) & (k[None, :] < K - start), other=0.0)
            y = tl.load(right, mask=(k[:, None] < K - start) & (n[None, :] < N), other=0.0)
            total = tl.dot(x, y, total)
            left += BK
            right += BK * N
        tl.store(c + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))

    return {"add": add, "softmax": softmax, "matmul": matmul}


def _seconds(calls: list[Callable[[], Any]], least_s: float) -> list[float]:
    """The median of each, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    begun = time.perf_counter()
    while time.perf_counter() - begun < least_s or len(times[0]) < 7:
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [sorted(taken)[len(taken) // 2] for taken in times]


def rows(least_s: float = 1.0) -> list[dict[str, Any]]:
    """Speed against torch with as many threads as torch uses, and the cost of an empty launch."""
    import triton

    from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm

    kernels = _kernels()
    size, count, columns, edge = 1 << 24, 2048, 4096, 1024
    x, y = torch.randn(size), torch.randn(size)
    wide, weight = x[: count * columns].view(count, columns), torch.randn(columns)
    a, b = torch.randn(edge, edge), torch.randn(edge, edge)
    out, wide_out, square = torch.empty(size), torch.empty_like(wide), torch.empty(edge, edge)
    cases: list[tuple[str, float, Callable[[], Any], Callable[[], Any]]] = [
        ("vector add, 16 Mi", 0.7, lambda: kernels["add"][(size // 1024,)](x, y, out, size, BLOCK=1024),
         lambda: torch.add(x, y, out=out)),
        ("softmax, 2048 x 4096", 0.5, lambda: kernels["softmax"][(count,)](wide, wide_out, columns, BLOCK=columns),
         lambda: torch.softmax(wide, -1, out=wide_out)),
        ("RMSNorm, 2048 x 4096, next to layer norm", 0.5, lambda: rms_norm(wide, weight, 1e-6, out=wide_out),
         lambda: torch.nn.functional.layer_norm(wide, (columns,), weight)),
        ("matmul, 1024 x 1024 x 1024", 0.2, lambda: kernels["matmul"][(edge // 64, edge // 64)](
            a, b, square, edge, edge, edge, BM=64, BN=64, BK=64), lambda: torch.mm(a, b, out=square)),
    ]  # fmt: skip
    found = []
    for name, must, ours, theirs in cases:
        own_s, torch_s = _seconds([ours, theirs], least_s)
        found.append({"name": f"backend: {name}", "value": torch_s / own_s, "unit": "x torch", "better": "higher",
                      "must": must, "ok": torch_s / own_s >= must, "own_ms": own_s * 1e3,
                      "torch_ms": torch_s * 1e3})  # fmt: skip
    tiny = torch.zeros(16)
    launch_s, add_s = _seconds(
        [
            lambda: kernels["add"][(1,)](tiny, tiny, tiny, 16, BLOCK=16),
            lambda: torch.add(tiny, tiny, out=tiny),
        ],
        0.2,
    )
    found.append({"name": f"backend: a launch through Triton {triton.__version__}", "value": launch_s * 1e6,
                  "unit": "us", "better": "lower", "torch_us": add_s * 1e6})  # fmt: skip
    return found


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores")
    for row in rows():
        print(
            f"{row['name']:56} {row['value']:7.2f} {row['unit']}"
            + (f"  (must {row['must']})" if "must" in row else "")
        )


if __name__ == "__main__":
    main()
