"""Kernels that use the language's corners one by one; torch says what is right. Played by test_language.py."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice


def same(found: Tensor, wanted: Tensor, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)


def launch(kernel, *arguments, grid=(1,), **options):
    """The tensors a kernel wrote, by their places."""
    kernel[grid](*arguments, **options)
    return {str(place): value for place, value in enumerate(arguments) if isinstance(value, Tensor)}


@triton.jit
def _add(x, y, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


def case_vectors_of_any_length_are_added_and_nothing_behind_them_is_touched():
    for size in (1, 63, 64, 1000, 70_001):
        x, y, out = torch.randn(size), torch.randn(size), torch.full((size + 9,), 7.0)
        launch(_add, x, y, out, size, grid=(triton.cdiv(size, 256),), BLOCK=256)
        same(out[:size], x + y)
        same(out[size:], torch.full((9,), 7.0))


def case_in_place_and_overlapping_tensors_are_read_before_they_are_written():
    x = torch.arange(256.0)
    launch(_add, x, x, x[1:], 255, BLOCK=256)
    same(x[1:], 2 * torch.arange(255.0))


@triton.jit
def _functions(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    v = tl.load(x + at)
    a = tl.abs(v) + 1e-3
    tl.store(out + at, tl.exp(v))
    tl.store(out + size + at, tl.exp2(v))
    tl.store(out + 2 * size + at, tl.log(a))
    tl.store(out + 3 * size + at, tl.log2(a))
    tl.store(out + 4 * size + at, tl.sqrt(a))
    tl.store(out + 5 * size + at, tl.rsqrt(a))
    tl.store(out + 6 * size + at, tl.sigmoid(v))
    tl.store(out + 7 * size + at, tl.math.erf(v))
    tl.store(out + 8 * size + at, tl.sin(v))
    tl.store(out + 9 * size + at, tl.cos(v))
    tl.store(out + 10 * size + at, tl.floor(v))
    tl.store(out + 11 * size + at, tl.ceil(v))
    tl.store(out + 12 * size + at, tl.math.fma(v, v, a))
    tl.store(out + 13 * size + at, tl.clamp(v, -1.0, 2.0))


def case_functions_of_float32_are_within_three_places_of_torch():
    edges = torch.tensor(
        [0.0, -0.0, 1e-38, -1e-38, 88.0, -88.0, 89.5, -104.0, 1e-20, -1e-7, 1.0, 0.9999999, 3.9, -0.5]
    )
    x = torch.cat((edges, torch.linspace(-80, 80, 1024), torch.randn(2048), torch.rand(1010) * 2))
    out = torch.empty(14, len(x))
    launch(_functions, x, out, len(x))
    y, a = x.double(), x.double().abs() + float(torch.tensor(1e-3))
    a = (x.abs() + 1e-3).double()
    wanted = [y.exp(), y.exp2(), a.log(), a.log2(), a.sqrt(), a.rsqrt(), y.sigmoid(), y.erf(), y.sin(), y.cos(),
              y.floor(), y.ceil(), y * y + a, y.clamp(-1, 2)]  # fmt: skip
    for row, (found, exact) in enumerate(zip(out, wanted, strict=True)):
        near = exact.float()
        place = torch.where(
            torch.isfinite(near), torch.nextafter(near.abs(), torch.tensor(math.inf)) - near.abs(), 1
        )
        difference = torch.where(near == found, 0, (found.double() - exact).abs() / place)
        if row == 9 or row == 8:  # of the whole circle, not of a zero crossing
            difference = (found.double() - exact).abs() / 6e-8
        worst = difference.max()
        assert worst <= 3, (row, float(worst), float(x[difference.argmax()]))


@triton.jit
def _edges(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    v = tl.load(x + at)
    tl.store(out + at, tl.exp(v))
    tl.store(out + size + at, tl.exp2(v))
    tl.store(out + 2 * size + at, tl.log(v))
    tl.store(out + 3 * size + at, tl.log2(v))
    tl.store(out + 4 * size + at, libdevice.tanh(v))
    tl.store(out + 5 * size + at, tl.math.erf(v))
    tl.store(out + 6 * size + at, tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 7 * size + at, tl.minimum(v, 0.0))


def case_infinities_and_nan_go_where_they_go_in_torch():
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -1.0, 200.0, -200.0, 1e-45])
    out = torch.empty(8, 8)
    launch(_edges, x, out, 8)
    wanted = [
        x.exp(),
        x.exp2(),
        x.log(),
        x.log2(),
        x.tanh(),
        x.erf(),
        x.clamp(min=0),
        x.nan_to_num(0, None, None),
    ]
    for found, row in zip(out[:7], wanted, strict=False):
        same(found, row, 1e-6)
    same(out[7], torch.tensor([0, -math.inf, 0, 0, -1, 0, -200, 0]))


@triton.jit
def _types(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def case_every_pair_of_types_converts_as_torch_does():
    floats = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    integers = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
    numbers = torch.cat((torch.randn(50) * 20, torch.tensor([0.0, -0.0, 1e-7, 6e-5, 3e-8, 65504.0, 1.0, 2.5, 3.5,
                                                            -1.5, 0.1, 100.25, -127.0, 1e-40])))  # fmt: skip
    pairs = [(a, b) for a in floats for b in floats if a != b] + [(torch.float32, b) for b in integers]
    pairs += [(a, torch.float16) for a in integers] + [(torch.int64, torch.int8), (torch.int8, torch.int64),
                                                       (torch.uint8, torch.int32)]  # fmt: skip
    for source, target in pairs:
        x = numbers.clamp(-100, 100).to(source) if source in integers else numbers.to(source)
        given = x.abs().clamp(max=100) if target in integers else x
        out = torch.empty(64, dtype=target)
        launch(_types, given, out, 64)
        same(out, given.to(target))
    for eight in (torch.float8_e4m3fn, torch.float8_e5m2):
        every = torch.arange(256, dtype=torch.uint8).view(eight)
        wide = torch.empty(256)
        launch(_types, every, wide, 256)
        same(wide, every.float())
        x = torch.cat((torch.randn(224) * 30, torch.tensor([2.0**-k for k in range(32)])))
        narrow = torch.empty(256, dtype=eight)
        launch(_types, x, narrow, 256)
        same(narrow.float(), x.to(eight).float())


@triton.jit
def _integers(x, y, out, size: tl.constexpr):
    at = tl.arange(0, size)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a // b)
    tl.store(out + size + at, a % b)
    tl.store(out + 2 * size + at, (a << 3) ^ (b >> 1))
    tl.store(out + 3 * size + at, (a & b) | ~a)
    tl.store(out + 4 * size + at, tl.where(a > b, a - b, b * a))
    tl.store(out + 5 * size + at, tl.minimum(a, b) + tl.maximum(a, b) * 2)
    tl.store(out + 6 * size + at, tl.cast(a, tl.uint32, bitcast=True) // 7)
    tl.store(out + 7 * size + at, tl.umulhi(a, b))


def case_integers_divide_towards_zero_and_wrap_around():
    x, y = (
        torch.randint(-(2**31), 2**31 - 1, (256,), dtype=torch.int32),
        torch.randint(1, 99, (256,), dtype=torch.int32),
    )
    out = torch.empty(8, 256, dtype=torch.int32)
    launch(_integers, x, y, out, 256)
    division = torch.div(x, y, rounding_mode="trunc")
    unsigned, y64 = x.long() & 0xFFFFFFFF, y.long()
    wanted = [division, x - division * y, (x << 3) ^ (y >> 1), (x & y) | ~x, torch.where(x > y, x - y, y * x),
              torch.minimum(x, y) + torch.maximum(x, y) * 2, unsigned // 7, (unsigned * y64) >> 32]  # fmt: skip
    for found, exact in zip(out, wanted, strict=True):
        same(found, exact.to(torch.int64).to(torch.int32))


@triton.jit
def _reductions(x, out, where, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    v = tl.load(x + r[:, None] * COLUMNS + c[None, :])
    tl.store(out + r, tl.sum(v, 1))
    tl.store(out + ROWS + r, tl.max(v, 1))
    tl.store(out + 2 * ROWS + r, tl.min(v * 2 + 1, 1))
    tl.store(where + r, tl.argmax(v, 1))
    tl.store(where + ROWS + r, tl.argmin(v, 1))
    best, place = tl.max(v, 0, return_indices=True)
    tl.store(out + 3 * ROWS + c, best)
    tl.store(where + 2 * ROWS + c, place)
    tl.store(out + 3 * ROWS + COLUMNS + c, tl.sum(v, 0))
    tl.store(out + 3 * ROWS + 2 * COLUMNS, tl.sum(v))
    tl.store(where + 2 * ROWS + COLUMNS, tl.sum((v > 0).to(tl.int32)))
    tl.store(where + 2 * ROWS + COLUMNS + 1, tl.xor_sum(tl.ravel((v * 100).to(tl.int32)), 0))


def case_reductions_along_each_dimension_with_indices_too():
    for rows, columns in ((1, 1), (2, 1), (64, 4), (16, 256)):
        x = torch.randn(rows, columns).round(decimals=1)  # ties: the first counts
        out, where = (
            torch.empty(3 * rows + 2 * columns + 1),
            torch.empty(2 * rows + columns + 2, dtype=torch.int32),
        )
        launch(_reductions, x, out, where, rows, columns)
        wanted = [x.sum(1), x.amax(1), (x * 2 + 1).amin(1), x.amax(0), x.sum(0), x.sum()[None]]
        same(out, torch.cat(wanted), 2e-5)
        first = torch.tensor([[int(row.eq(row.max()).nonzero()[0]) for row in x],
                              [int(row.eq(row.min()).nonzero()[0]) for row in x]])  # fmt: skip
        same(where[: 2 * rows].view(2, rows), first)
        same(where[2 * rows : 2 * rows + columns],
             torch.tensor([int(row.eq(row.max()).nonzero()[0]) for row in x.T]))  # fmt: skip
        assert int(where[-2]) == int((x > 0).sum())
        bits = 0
        for number in (x * 100).to(torch.int32).flatten().tolist():
            bits ^= number
        assert int(where[-1]) == bits


@triton.jit
def _welford(mean_a, var_a, count_a, mean_b, var_b, count_b):
    delta, count = mean_b - mean_a, count_a + count_b
    return mean_a + delta * count_b / count, var_a + var_b + delta * delta * count_a * count_b / count, count


@triton.jit
def _own_reduction(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    v = tl.load(x + at)
    mean, var, count = tl.reduce((v, v * 0, v * 0 + 1), 0, _welford)
    tl.store(out, mean)
    tl.store(out + 1, var / count)


def case_a_reduction_of_three_operands_with_a_function_of_its_own():
    x, out = torch.randn(4096), torch.empty(2)
    launch(_own_reduction, x, out, 4096)
    same(out, torch.stack((x.mean(), x.var(unbiased=False))), 1e-5)


@triton.jit
def _scans(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    v = tl.load(x + at)
    tl.store(out + at, tl.cumsum(v, 1))
    tl.store(out + ROWS * COLUMNS + at, tl.cumsum(v, 0))
    tl.store(out + 2 * ROWS * COLUMNS + at, tl.cumsum(v, 1, reverse=True))
    tl.store(out + 3 * ROWS * COLUMNS + at, tl.cumprod(v, 0))
    tl.store(out + 4 * ROWS * COLUMNS + at, tl.sort(v, 1))
    tl.store(out + 5 * ROWS * COLUMNS + at, tl.sort(v, 1, descending=True))
    tl.store(out + 6 * ROWS * COLUMNS + at, tl.flip(v, 1))


def case_scans_sorts_and_flips():
    for rows, columns in ((1, 8), (4, 16)):
        x, out = torch.randn(rows, columns), torch.empty(7, rows, columns)
        launch(_scans, x, out, rows, columns)
        wanted = [x.cumsum(1), x.cumsum(0), x.flip(1).cumsum(1).flip(1), x.cumprod(0), x.sort(1)[0],
                  x.sort(1, descending=True)[0], x.flip(1)]  # fmt: skip
        same(out, torch.stack(wanted), 1e-5)


@triton.jit
def _shapes(x, y, out, A: tl.constexpr, B: tl.constexpr):
    a, b = tl.arange(0, A), tl.arange(0, B)
    v = tl.load(x + a[:, None] * B + b[None, :])
    w = tl.load(y + a[:, None] * B + b[None, :])
    SIZE: tl.constexpr = A * B
    flat = tl.arange(0, SIZE)
    tl.store(out + b[:, None] * A + a[None, :], tl.exp(tl.trans(v)))
    tl.store(out + SIZE + flat, tl.reshape(tl.trans(v), (SIZE,)))
    tl.store(out + 2 * SIZE + tl.arange(0, 2 * SIZE), tl.ravel(tl.interleave(v, w)))
    left, right = tl.split(tl.join(v * 2, w))
    tl.store(out + 4 * SIZE + flat, tl.ravel(left - right))
    cube = tl.reshape(v, (A, 2, B // 2))
    tl.store(out + 5 * SIZE + flat, tl.ravel(tl.permute(cube, (2, 0, 1))))
    chosen = tl.gather(v, ((b[None, :] * 7 + a[:, None]) % B).to(tl.int32), 1)
    tl.store(out + 6 * SIZE + flat, tl.ravel(chosen))
    tl.store(out + 7 * SIZE + flat, tl.ravel(tl.broadcast_to(tl.sum(v, 1)[:, None], (A, B))))
    tl.store(out + 8 * SIZE + tl.arange(0, 16), tl.histogram((flat * 5) % 16, 16))


def case_transposes_reshapes_joins_splits_and_gathers():
    for A, B in ((2, 8), (64, 16)):
        x, y = torch.randn(A, B), torch.randn(A, B)
        out = torch.empty(8 * A * B + 16)
        launch(_shapes, x, y, out, A, B)
        at = (torch.arange(B)[None] * 7 + torch.arange(A)[:, None]) % B
        wanted = [x.T.exp(), x.T, torch.stack((x, y), -1), x * 2 - y, x.view(A, 2, B // 2).permute(2, 0, 1),
                  x.gather(1, at), x.sum(1, keepdim=True).expand(A, B)]  # fmt: skip
        same(out[:-16], torch.cat([part.reshape(-1) for part in wanted]), 2e-5)
        same(out[-16:], torch.bincount((torch.arange(A * B) * 5) % 16, minlength=16))


@triton.jit
def _atomics(numbers, halves, integers, before, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.atomic_add(numbers + at % 8, at.to(tl.float32))
    tl.atomic_add(halves + at % 8, (at % 3).to(tl.bfloat16))
    tl.atomic_add(integers + at % 4, 1, mask=at < 50)
    tl.atomic_max(integers + 4 + at % 2, at)
    tl.atomic_min(integers + 6 + at % 2, -at)
    tl.atomic_or(integers + 8, 1 << (tl.program_id(0) % 8))
    tl.atomic_xor(integers + 9, tl.program_id(0))
    tl.atomic_and(integers + 10, ~(1 << (tl.program_id(0) % 8)))
    tl.atomic_max(numbers + 8, -1.0 * tl.program_id(0))
    ticket = tl.atomic_add(before + 64, 1)
    tl.store(before + ticket, ticket)
    lock = tl.atomic_cas(integers + 11, 0, 1)
    while lock == 1:
        lock = tl.atomic_cas(integers + 11, 0, 1)
    tl.store(integers + 12, tl.load(integers + 12) + 1)
    tl.atomic_xchg(integers + 11, 0)


def case_atomics_of_many_programs_lose_nothing():
    numbers, halves = torch.zeros(9), torch.zeros(8, dtype=torch.bfloat16)
    numbers[8] = -99
    integers, before = torch.zeros(16, dtype=torch.int32), torch.zeros(65, dtype=torch.int32)
    integers[10] = 0xFF
    launch(_atomics, numbers, halves, integers, before, grid=(64,), size=64)
    same(numbers[:8], torch.tensor([64.0 * sum(range(k, 64, 8)) for k in range(8)]))
    assert numbers[8] == 0
    assert (
        halves.float() - 64 * torch.tensor([float(sum(i % 3 for i in range(k, 64, 8))) for k in range(8)])
    ).abs().max() <= 256
    counts = [64 * len(range(k, 50, 4)) for k in range(4)]
    assert integers.tolist()[:13] == [*counts, 62, 63, -62, -63, 255, 0, 0, 0, 64]
    same(before[:64], torch.arange(64))


@triton.jit
def _collatz(x, steps, size):
    at = tl.program_id(0)
    if at >= size:
        return
    number = tl.load(x + at)
    count = 0
    while number != 1:
        if number % 2 == 0:
            number = number // 2
        else:
            number = 3 * number + 1
        count += 1
    tl.store(steps + at, count)


def case_loops_until_something_happens_and_early_returns():
    x = torch.tensor([1, 2, 3, 7, 27, 97], dtype=torch.int32)
    steps = torch.full((8,), -1, dtype=torch.int32)
    launch(_collatz, x, steps, 6, grid=(8,))
    assert steps.tolist() == [0, 1, 7, 16, 111, 118, -1, -1]


@triton.jit
def _nested(x, out, n, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    older = tl.full((BLOCK,), 1.0, tl.float32)
    newer = tl.full((BLOCK,), 2.0, tl.float32)
    pointers = x + at
    for i in range(0, n, 2):
        if i % 4 == 0:
            step = tl.load(pointers)
        else:
            step = -tl.load(pointers) * flag
        for j in tl.range(i, 0, -1):
            total += step * j
        older, newer = newer, older + step
        pointers += 2
        if flag > 1:
            pointers += at  # the stride of the pointers changes
    tl.store(out + at, total)
    tl.store(out + BLOCK + at, older)
    tl.store(out + 2 * BLOCK + at, newer)


def case_loops_in_loops_carry_blocks_swapped_blocks_and_pointers():
    for flag in (1, 3):
        x, out = torch.randn(4000), torch.empty(3, 64)
        launch(_nested, x, out, 9, flag, BLOCK=64)
        at = torch.arange(64)
        total, older, newer, pointers = (
            torch.zeros(64),
            torch.full((64,), 1.0),
            torch.full((64,), 2.0),
            at.clone(),
        )
        for i in range(0, 9, 2):
            step = x[pointers] if i % 4 == 0 else -x[pointers] * flag
            total = total + sum((step * j for j in range(i, 0, -1)), torch.zeros(64))
            older, newer = newer, older + step
            pointers = pointers + 2 + (at if flag > 1 else 0)
        same(out, torch.stack((total, older, newer)), 1e-5)


@triton.jit(noinline=True)
def _horner(x, a, b):
    if x > 1.0:
        return a
    return a * x + b


@triton.jit
def _calls(x, out):
    at = tl.program_id(0)
    v = tl.load(x + at)
    tl.store(out + at, _horner(v, 2.0, 1.0) + _horner(-v, v, 0.5))


def case_functions_that_are_not_inlined():
    x, out = torch.linspace(-2, 2, 9), torch.empty(9)
    launch(_calls, x, out, grid=(9,))

    def horner(x, a, b):
        return torch.where(x > 1, a * torch.ones_like(x), a * x + b)

    same(out, horner(x, 2.0, 1.0) + horner(-x, x, 0.5), 1e-6)


@triton.jit
def _product(a, b, c, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AT: tl.constexpr,
             BT: tl.constexpr):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        if AT:
            left = tl.load(
                a + k[None, :] * M + m[:, None], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0
            )
        else:
            left = tl.load(
                a + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0
            )
        if BT:
            right = tl.load(
                b + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0
            )
        else:
            right = tl.load(
                b + k[:, None] * N + n[None, :], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0
            )
        total += tl.dot(left, right)
    inside = (m[:, None] < M) & (n[None, :] < N)
    at = m[:, None] * N + n[None, :]
    bias = tl.load(c + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty) + bias, mask=inside)


def case_products_of_any_size_type_and_orientation():
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)):
        for (M, N, K), (BM, BN, BK) in (
            ((5, 7, 3), (16, 16, 16)),
            ((65, 130, 47), (32, 64, 32)),
            ((64, 8, 64), (64, 8, 16)),
        ):
            for AT in (False, True):
                for BT in (False, True) if BM == 32 and dtype == torch.float32 else (AT,):
                    a, b, c = (torch.randn(*shape).to(dtype) for shape in ((M, K), (K, N), (M, N)))
                    out = torch.empty(M, N, dtype=dtype)
                    left, right = (a.T.contiguous() if AT else a), (b.T.contiguous() if BT else b)
                    grid = (triton.cdiv(M, BM), triton.cdiv(N, BN))
                    launch(
                        _product, left, right, c, out, M, N, K, grid=grid, BM=BM, BN=BN, BK=BK, AT=AT, BT=BT
                    )
                    same(out, ((a.double() @ b.double()).to(dtype) + c), tolerance)


@triton.jit
def _products_of_other_kinds(
    a, b, out, whole, x, y, z, BATCH: tl.constexpr, M: tl.constexpr, K: tl.constexpr
):
    i, m, k = tl.arange(0, BATCH), tl.arange(0, M), tl.arange(0, K)
    left = tl.load(a + i[:, None, None] * M * K + m[None, :, None] * K + k[None, None, :])
    right = tl.load(b + i[:, None, None] * M * K + m[None, :, None] * K + k[None, None, :])
    result = tl.dot(left, tl.permute(right, (0, 2, 1)))
    tl.store(out + i[:, None, None] * M * M + m[None, :, None] * M + m[None, None, :], result)
    small, other = tl.load(x + m[:, None] * K + k[None, :]), tl.load(y + m[:, None] * K + k[None, :])
    tl.store(whole + m[:, None] * M + m[None, :], tl.dot(small, tl.trans(other)))
    scores = tl.dot(small.to(tl.float32), tl.trans(other.to(tl.float32)))
    p = tl.exp2(scores / 1000 - tl.max(scores / 1000, 1)[:, None])
    tl.store(z + m[:, None] * K + k[None, :], tl.dot(p, other.to(tl.float32)))


def case_batched_and_integer_products_and_a_product_of_a_product():
    a, b, out = torch.randn(4, 16, 32), torch.randn(4, 16, 32), torch.empty(4, 16, 16)
    x, y = (torch.randint(-100, 100, (16, 32), dtype=torch.int8) for _ in range(2))
    whole, z = torch.empty(16, 16, dtype=torch.int32), torch.empty(16, 32)
    launch(_products_of_other_kinds, a, b, out, whole, x, y, z, 4, 16, 32)
    same(out, a @ b.mT, 1e-4)
    same(whole, x.int() @ y.int().T)
    scores = x.double() @ y.double().T / 1000
    same(z, (torch.exp2(scores - scores.amax(1, keepdim=True)) @ y.double()).float(), 1e-3)


@triton.jit
def _descriptor(x, out, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BM, BN])
    target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([row, column], source.load([row, column]) * 2)


def case_tensor_descriptors_made_in_the_kernel():
    x = torch.randn(37, 52)
    out = torch.zeros(37, 52)
    launch(_descriptor, x, out, 37, 52, grid=(3, 4), BM=16, BN=16)
    same(out, x * 2)


@triton.jit
def _dropout(x, out, size, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > p
    v = tl.load(x + at, mask=at < size, other=0.0)
    tl.store(out + at, tl.where(keep, v / (1 - p), 0.0), mask=at < size)


def case_random_numbers_are_those_of_the_interpreter():
    x, out = torch.ones(1000), torch.empty(1000)
    tensors = launch(_dropout, x, out, 1000, 0.5, 123, grid=(4,), BLOCK=256)
    assert 0.4 < float((out > 0).float().mean()) < 0.6
    return {"out": tensors["1"]}


@triton.jit
def _grid(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(out + at, x + 10 * y + 100 * z)


def case_a_grid_of_three_dimensions_and_an_empty_one():
    out = torch.empty(4, 3, 5, dtype=torch.int32)
    launch(_grid, out, grid=(5, 3, 4))
    x, y, z = torch.arange(5), torch.arange(3)[:, None], torch.arange(4)[:, None, None]
    same(out, x + 10 * y + 100 * z)
    launch(_grid, out, grid=(0, 3, 4))


@triton.jit
def _masks(x, out, low, high, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    at = m[:, None] * N + n[None, :]
    band = (n[None, :] >= low) & (n[None, :] < high) & (m[:, None] <= high) & (2 * n[None, :] < 3 * high)
    causal = m[:, None] >= n[None, :]
    odd = (at % 3 == 1) | (n[None, :] < low)
    tl.store(out + at, tl.load(x + at, mask=band, other=-1.0))
    tl.store(out + M * N + at, tl.load(x + at, mask=causal & band, other=-2.0))
    tl.store(out + 2 * M * N + at, tl.load(x + at, mask=odd & (low > 0)))
    tl.store(out + 3 * M * N + at, at * 1.0, mask=band & causal)
    tl.store(out + 4 * M * N + at, at * 1.0, mask=odd)
    tl.store(out + 5 * M * N + (M - 1 - m[:, None]) * N + n[None, :], at * 1.0, mask=n[None, :] != low)


def case_masks_that_are_bands_triangles_or_neither():
    for M, N, low, high in ((8, 16, 0, 16), (8, 16, 3, 9), (8, 16, 9, 4), (1, 32, 2, 30)):
        x = torch.randn(M, N)
        out = torch.full((6, M, N), 5.0)
        launch(_masks, x, out, low, high, M, N)
        m, n = torch.arange(M)[:, None], torch.arange(N)[None]
        at = (m * N + n).float()
        band = (n >= low) & (n < high) & (m <= high) & (2 * n < 3 * high)
        odd = (at % 3 == 1) | (n < low)
        same(out[0], torch.where(band, x, -1))
        same(out[1], torch.where(band & (m >= n), x, -2))
        live = odd & torch.tensor(low > 0)
        same(out[2][live], x[live])
        five = torch.full((M, N), 5.0)
        same(out[3], torch.where(band & (m >= n), at, five))
        same(out[4], torch.where(odd, at, five))
        same(out[5], torch.where(n != low, at, five).flip(0))
