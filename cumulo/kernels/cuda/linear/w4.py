"""w4: the product of a few rows of 16-bit activations with 4-bit weights (W4A16). `linear` calls `w4_linear`.

Must move: half a byte a weight and four bytes a group of 32, 64 or 128, about a quarter of bfloat16, so up to four
times the speed where reading weights is all the time. Then unpacking counts: a code put into the last bits of a
power of two is that power plus the code, for two weights an instruction, and the scale multiplies a group's
product, not every weight. And beginning and ending count: a product of one row takes a few microseconds, so the
norm before it, SwiGLU and the residual behind it are part of it, as in `skinny_linear`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cumulo.kernels.cuda.linear.skinny_linear import PARTIAL_FLOATS, workspace
from cumulo.kernels.cuda.linear.small_linear import BENCH_SHAPES, random_bf16
from cumulo.kernels.cuda.linear.w4_weight import STEP, W4Weight
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us
from cumulo.kernels.cuda.work import KernelRow, Work

LEAST_ROWS, MOST_ROWS = 8, 64  # of activations in a tile: at least what the tensor cores take
EARLY_WEIGHTS = 32 << 20
AHEAD = 2  # steps whose weights a program that begins early fetches into the cache
# Rows of weights, warps and stages that `tune` tries, of a few rows of activations and of more.
_TILES_OF_FEW = ((64, 2, 3), (64, 2, 5), (32, 1, 3), (32, 1, 5), (128, 4, 3))
_TILES = ((128, 4, 3), (64, 2, 3), (128, 4, 5), (128, 8, 3), (64, 4, 3))


@dataclass(frozen=True, slots=True)
class W4Config:
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    early: bool = False  # begins while the kernel before it ends (programmatic dependent launch)


def default_config(
    m: int, n: int, k: int, group: int, multiprocessors: int = 132, swiglu: bool = False
) -> W4Config:
    """As many programs as all multiprocessors hold at once: a step is short, so others must run while one waits.
    With more rows a program has enough to do, and adding splits up costs more. One row of a matrix of up to 16 MiB
    starts before the kernel ahead has ended."""
    block_n, warps = (64, 2) if m <= 4 else (128, 4)
    tiles = triton.cdiv(n // 2 if swiglu else n, block_n) * triton.cdiv(m, MOST_ROWS)
    enough = (3 if m <= 16 else 4 / 3) * multiprocessors
    splits = 1
    while tiles * splits < enough and k // STEP // (2 * splits) >= 4:
        splits *= 2
    return W4Config(block_n, splits, warps, 3, early=m == 1 and not swiglu and n * k <= EARLY_WEIGHTS)


def candidates(m: int, n: int, k: int, group: int, swiglu: bool = False) -> list[W4Config]:
    """What `tune` tries."""
    default = default_config(m, n, k, group, swiglu=swiglu)
    found = [default]
    for block_n, warps, stages in _TILES_OF_FEW if m <= 4 else _TILES:
        splits = max(1, default.splits * default.block_n // block_n)
        found += [
            W4Config(block_n, each, warps, stages, early)
            for each in (splits, 2 * splits, max(1, splits // 2))
            if k // STEP // each >= 2
            for early in ((False, True) if m <= 4 else (False,))
        ]
    return list(dict.fromkeys(found))


def reference(
    x: Tensor, weight: W4Weight, residual: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    y = F.linear(x, weight.dequantised(x.dtype), bias)
    return y if residual is None else residual + y


# Two words become four pairs of bfloat16, place by place.
_PLACES = """{{
.reg .b32 rest, less;
mov.b32 less, {less};
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
shr.u32 rest, $4, 4;
lop3.b32 $1, rest, 0x000f000f, 0x43004300, 0xea;
shr.u32 rest, $4, 8;
lop3.b32 $2, rest, 0x000f000f, 0x43004300, 0xea;
shr.u32 rest, $4, 12;
lop3.b32 $3, rest, 0x000f000f, 0x43004300, 0xea;
sub.bf16x2 $0, $0, less;
sub.bf16x2 $1, $1, less;
sub.bf16x2 $2, $2, less;
sub.bf16x2 $3, $3, less;
}}"""
_LESS_128 = tl.constexpr(_PLACES.format(less="0x43004300"))
_LESS_136 = tl.constexpr(_PLACES.format(less="0x43084308"))


@triton.jit
def _numbers(words, OFFSET: tl.constexpr, PAIRED: tl.constexpr, dtype: tl.constexpr):
    """The codes in the four places of a tile of words, less OFFSET. `PAIRED`: by Hopper's instructions for two
    bfloat16 at a time."""
    if PAIRED:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _LESS_136 if OFFSET == 8 else _LESS_128,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        p0, p1 = ((words & 15) - OFFSET).to(dtype), (((words >> 4) & 15) - OFFSET).to(dtype)
        p2, p3 = (((words >> 8) & 15) - OFFSET).to(dtype), (((words >> 12) & 15) - OFFSET).to(dtype)
    return p0, p1, p2, p3


@triton.jit
def _activations(x, gains, m_mask, squared, NORM: tl.constexpr):
    """A place's activations; to be normed: times the norm's gains, with their squares summed on the way."""
    values = tl.load(x, mask=m_mask[:, None], other=0.0)
    if NORM:
        wide = values.to(tl.float32)
        squared += wide * wide
        values = (wide * tl.load(gains)[None, :].to(tl.float32)).to(values.dtype)
    return values, squared


@triton.jit
def _add_group(acc, product, total, scales, minimums, place, AFFINE: tl.constexpr):
    """Scale a group's product into the sum."""
    acc += product * tl.load(scales + place)[:, None]
    if AFFINE:
        acc += tl.load(minimums + place)[:, None] * total[None, :]
    return acc


@triton.jit
def _w4_kernel(x, words, scales, minimums, out, norm_weight, residual, bias, partials, counters, M, OUTPUTS, N, K,
               STEPS_PER_SPLIT, stride_x, stride_out, stride_residual, eps, GROUP: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
               AFFINE: tl.constexpr, PAIRED: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr,
               RESIDUAL: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    OFFSET: tl.constexpr = 0 if AFFINE else 8
    PARTS: tl.constexpr = 128 // GROUP  # groups of a step
    tile, split, m_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_offsets = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_safe = tl.minimum(n_offsets, OUTPUTS - 1)  # rows past the end are read again and not stored
    m_offsets = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = m_offsets < M
    columns = tl.arange(0, 32)
    steps = K // 128
    x_tile = x + m_offsets.to(tl.int64)[:, None] * stride_x + columns[None, :]
    gains = norm_weight + columns
    w_rows = (n_safe // 64).to(tl.int64) * steps * 2048 + (n_safe % 64) * 32
    w_tile = words + w_rows[:, None] + columns[None, :]
    u_safe = n_safe + OUTPUTS
    u_rows = (u_safe // 64).to(tl.int64) * steps * 2048 + (u_safe % 64) * 32
    u_tile = words + u_rows[:, None] + columns[None, :]
    acc, up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    product, product_u = acc, up
    total = tl.zeros([BLOCK_M], tl.float32)
    squared = tl.zeros(
        [BLOCK_M, 32], tl.float32
    )  # summed at the end: no exchange between threads in the loop
    first = split * STEPS_PER_SPLIT
    last = tl.minimum(first + STEPS_PER_SPLIT, steps)
    if EARLY:
        # Weights depend on nobody: they are on their way to the cache while the kernel before this one ends.
        for ahead in tl.static_range(AHEAD):
            _prefetch(words + w_rows + tl.minimum(first + ahead, last - 1) * 2048)
            if SWIGLU:
                _prefetch(words + u_rows + tl.minimum(first + ahead, last - 1) * 2048)
        gdc_wait()
        gdc_launch_dependents()
    # Saying num_stages here, not at the launch alone, makes the scales travel ahead with the codes.
    for step in tl.range(first, last, num_stages=STAGES):
        w = tl.load(w_tile + step * 2048, eviction_policy="evict_first")
        p = _numbers(w, OFFSET, PAIRED, x.dtype.element_ty)
        if SWIGLU:
            u = tl.load(u_tile + step * 2048, eviction_policy="evict_first")
            q = _numbers(u, OFFSET, PAIRED, x.dtype.element_ty)
        for j in tl.static_range(4):
            values, squared = _activations(
                x_tile + step * 128 + 32 * j, gains + step * 128 + 32 * j, m_mask, squared, NORM
            )
            turned = tl.trans(values)
            product = tl.dot(p[j], turned, product, input_precision="ieee")
            if SWIGLU:
                product_u = tl.dot(q[j], turned, product_u, input_precision="ieee")
            if AFFINE:
                total += tl.sum(values.to(tl.float32), axis=1)
            if (j + 1) % (4 // PARTS) == 0:  # a group ends here
                place = (step * PARTS + j // (4 // PARTS)) * N
                acc = _add_group(acc, product, total, scales, minimums, place + n_safe, AFFINE)
                product = tl.zeros_like(product)
                if SWIGLU:
                    up = _add_group(up, product_u, total, scales, minimums, place + u_safe, AFFINE)
                    product_u = tl.zeros_like(product_u)
                total = tl.zeros_like(total)

    squares = tl.sum(squared, axis=1)
    is_last = True
    if SPLITS > 1:
        # As in skinny_linear: partial sums of one tile lie together; who arrives last adds them in order.
        HALVES: tl.constexpr = 2 if SWIGLU else 1
        CELLS: tl.constexpr = BLOCK_N * BLOCK_M
        where = m_tile * tl.num_programs(0) + tile
        cells = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        base = partials + where.to(tl.int64) * SPLITS * (HALVES * CELLS + BLOCK_M)
        base_squares = base + SPLITS * HALVES * CELLS + tl.arange(0, BLOCK_M)
        tl.store(base + split * HALVES * CELLS + cells, acc, cache_modifier=".cg")
        if SWIGLU:
            tl.store(base + (split * HALVES + 1) * CELLS + cells, up, cache_modifier=".cg")
        if NORM:
            tl.store(base_squares + split * BLOCK_M, squares, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's part is written before one thread says so
        is_last = tl.atomic_add(counters + where, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc, up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            squares = tl.zeros([BLOCK_M], tl.float32)
            for other in range(SPLITS):
                acc += tl.load(base + other * HALVES * CELLS + cells, cache_modifier=".cg")
                if SWIGLU:
                    up += tl.load(base + (other * HALVES + 1) * CELLS + cells, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(base_squares + other * BLOCK_M, cache_modifier=".cg")
            tl.atomic_xchg(counters + where, 0, sem="relaxed")  # ready for the next launch

    if is_last:
        mask = (n_offsets < OUTPUTS)[:, None] & m_mask[None, :]
        if NORM:
            rstd = tl.rsqrt(squares / K + eps)[None, :]
            acc *= rstd
            up *= rstd
        if BIAS:
            acc += tl.load(bias + n_safe).to(tl.float32)[:, None]
        if SWIGLU:
            if BIAS:
                up += tl.load(bias + u_safe).to(tl.float32)[:, None]
            acc = acc * tl.sigmoid(acc) * up
        if RESIDUAL:
            places = residual + m_offsets.to(tl.int64)[None, :] * stride_residual + n_offsets[:, None]
            acc += tl.load(places, mask=mask, other=0.0).to(tl.float32)
        places = out + m_offsets.to(tl.int64)[None, :] * stride_out + n_offsets[:, None]
        tl.store(places, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _prefetch(places):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


def w4_linear(
    x: Tensor,
    weight: W4Weight,
    out: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
    config: W4Config | None = None,
) -> Tensor:
    """x [M, K] times a 4-bit weight [N, K] into `out`, which may be `residual`; made for M up to 256 or so. Other
    arguments are skinny_linear's."""
    m, k = x.shape
    n = weight.shape[0]
    outputs = n // 2 if swiglu else n
    if out is None:
        out = torch.empty((m, outputs), dtype=x.dtype, device=x.device)
    if config is None:
        config = default_config(m, n, k, weight.group, swiglu=swiglu)
    block_m = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(m)))
    tiles, m_tiles = triton.cdiv(outputs, config.block_n), triton.cdiv(m, block_m)
    splits = min(config.splits, k // STEP)
    cells = ((2 if swiglu else 1) * config.block_n + 1) * block_m
    while splits > 1 and tiles * m_tiles * splits * cells > PARTIAL_FLOATS:
        splits //= 2
    partials, counters = workspace(x.device) if splits > 1 else (x, x)
    early = config.early and x.is_cuda
    _w4_kernel[(tiles, splits, m_tiles)](
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.minimums is None else weight.minimums,
        out,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        x if bias is None else bias,
        partials,
        counters,
        m,
        outputs,
        n,
        k,
        triton.cdiv(k // STEP, splits),
        x.stride(0),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        GROUP=weight.group,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        STAGES=config.num_stages,
        AFFINE=weight.minimums is not None,
        PAIRED=x.is_cuda and x.dtype == torch.bfloat16,
        NORM=norm_weight is not None,
        SWIGLU=swiglu,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        EARLY=early,
        AHEAD=AHEAD,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if early else {}),
    )
    return out


@torch.library.custom_op("cumulo::w4_linear", mutates_args=())
def w4_linear_op(x: Tensor, words: Tensor, scales: Tensor, minimums: Tensor | None, group: int) -> Tensor:
    return w4_linear(x, W4Weight(words, scales, minimums, group))


@w4_linear_op.register_fake
def _(x: Tensor, words: Tensor, scales: Tensor, minimums: Tensor | None, group: int) -> Tensor:
    return x.new_empty(x.shape[0], scales.shape[1])


def work(m: int, weight: W4Weight) -> Work:
    n, k = weight.shape
    return Work(bytes=weight.nbytes + 2 * m * (k + n), flops=2 * m * n * k)


def bench_rows(device: torch.device | str = "cuda") -> Iterator[KernelRow]:
    """The decode linears of an 8B model, against the same in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    for name, n, k, _ in BENCH_SHAPES:
        if not name.startswith("Llama"):
            continue
        copies = copies_past_cache(n * k // 2)
        plain = random_bf16(n, k, device=device, generator=generator, std=k**-0.5)
        first = W4Weight.quantised(plain)
        weights = [W4Weight(first.words.clone(), first.scales, None, first.group) for _ in range(copies)]
        for m in (1, 16, 64):
            x = random_bf16(m, k, device=device, generator=generator)
            out = w4_linear(x, first)
            exact = reference(x.double(), first)
            yield KernelRow(
                name="w4_linear",
                shape=f"{name} m={m} n={n} k={k} groups of {first.group}",
                work=work(m, first),
                ours_us=graph_us(lambda i: w4_linear(x, weights[i], out), copies),
                rivals_us={"cuBLAS, bfloat16": graph_us(lambda i: F.linear(x, plain))},
                config=str(default_config(m, n, k, first.group)),
                error=float((out - exact).norm() / exact.norm()),
            )
