"""w4: weights of 4 bits in groups that share a scale, and the product of 16-bit activations with them (W4A16).
`linear` calls `w4_linear`.

Must move: half a byte a weight and four bytes a group of 32, 64 or 128, about a quarter of bfloat16, so up to four
times the speed where reading weights is all the time. The product is turned around as in skinny_linear; a step of
k is one group: its codes go to the tensor cores as exact small integers and the group's scale multiplies the
product, not every weight. A byte holds column j of its group in the low half and column j + group/2 in the high
one: both halves of a tile of bytes are tiles of neighbouring columns, and nothing is shuffled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cumulo.kernels.cuda.elementwise.swiglu import swiglu as swiglu_rows
from cumulo.kernels.cuda.linear.skinny_linear import PARTIAL_FLOATS, workspace
from cumulo.kernels.cuda.linear.small_linear import BENCH_SHAPES, random_bf16
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us
from cumulo.kernels.cuda.work import KernelRow, Work

GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class W4Weight:
    """A matrix [N, K] in 4 bits: w = scale·(code − 8), or scale·code + minimum where minimums are given.

    data [N, K/2] uint8, scales and minimums [K/group, N] float32 (a group's scales lie together).
    """

    data: Tensor
    scales: Tensor
    minimums: Tensor | None
    group: int

    @classmethod
    def quantised(cls, weight: Tensor, group: int = 128, affine: bool = False) -> "W4Weight":
        """The nearest codes under scales from each group's extremes. Scales are kept in float32: the asynchronous
        copies that bring them with the codes move no less than four bytes."""
        n, k = weight.shape
        if group not in GROUPS or k % group:
            raise ValueError(
                f"4-bit groups of {group} do not divide rows of {k} weights: choose one of {GROUPS} that does"
            )
        groups = weight.float().view(n, k // group, group)
        minimums = None
        if affine:
            low, high = groups.amin(-1), groups.amax(-1)
            scales = ((high - low) / 15).clamp_min(1e-12)
            minimums = low
            codes = (groups - low[..., None]) / scales[..., None]
        else:
            extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
            # The extreme gets code 0, the end of the range with one step more (as GGUF's Q4_0).
            scales = torch.where(extreme == 0, torch.full_like(extreme, 1e-12), extreme / -8)
            codes = groups / scales[..., None] + 8
        return cls.packed(
            codes.round().clamp(0, 15).to(torch.uint8).view(n, k),
            scales.t().contiguous(),
            None if minimums is None else minimums.t().contiguous(),
            group,
        )

    @classmethod
    def packed(cls, codes: Tensor, scales: Tensor, minimums: Tensor | None, group: int) -> "W4Weight":
        """From codes [N, K] of 0..15 and scales [K/group, N]."""
        n, k = codes.shape
        low, high = codes.view(n, k // group, 2, group // 2).unbind(2)
        return cls((low | (high << 4)).reshape(n, k // 2), scales, minimums, group)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.data.shape[0], 2 * self.data.shape[1]))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes + (0 if self.minimums is None else self.minimums.nbytes)

    def codes(self) -> Tensor:
        """[N, K] of 0..15."""
        n, k = self.shape
        halves = self.data.view(n, k // self.group, 1, self.group // 2)
        return torch.cat([halves & 15, halves >> 4], dim=2).view(n, k)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        scales = self.scales.t().repeat_interleave(self.group, 1)
        if self.minimums is None:
            return ((self.codes().float() - 8) * scales).to(dtype)
        return (self.codes() * scales + self.minimums.t().repeat_interleave(self.group, 1)).to(dtype)


@dataclass(frozen=True, slots=True)
class W4Config:
    block_n: int
    splits: int
    num_warps: int
    num_stages: int


def default_config(m: int, n: int, k: int, group: int, multiprocessors: int = 132) -> W4Config:
    """Four programs on every multiprocessor: a step is short, so others must run while one waits."""
    block_n = 64
    splits = 1
    while triton.cdiv(n, block_n) * splits < 4 * multiprocessors and k // group // (2 * splits) >= 8:
        splits *= 2
    return W4Config(block_n, splits, 4, 6 if m <= 32 else 4)


def candidates(m: int, n: int, k: int, group: int) -> list[W4Config]:
    """What `tune` tries."""
    default = default_config(m, n, k, group)
    found = [default]
    for block_n, warps, stages in ((64, 4, 4), (64, 4, 8), (128, 4, 4), (128, 4, 6), (128, 8, 4)):
        splits = max(1, default.splits * 64 // block_n)
        found += [W4Config(block_n, each, warps, stages) for each in (splits, max(1, splits // 2))]
    return list(dict.fromkeys(found))[:12]


def reference(
    x: Tensor, weight: W4Weight, residual: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    y = F.linear(x, weight.dequantised(x.dtype), bias)
    return y if residual is None else residual + y


@triton.jit
def _whole_numbers(codes, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Codes 0..15 less OFFSET as floats. A code put into the last bits of a power of two is that power plus the
    code: two cheap operations where the conversion instruction has a quarter of their rate."""
    if dtype == tl.bfloat16:
        numbers = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128 + OFFSET)
    elif dtype == tl.float16:
        numbers = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024 + OFFSET)
    else:
        numbers = codes.to(dtype) - OFFSET
    return numbers.to(dtype)


@triton.jit
def _group_scales(scales, minimums, group, rows, N, AFFINE: tl.constexpr):
    place = group * N + rows
    scale = tl.load(scales + place)
    minimum = scale
    if AFFINE:
        minimum = tl.load(minimums + place)
    return scale, minimum


@triton.jit
def _w4_kernel(x, data, scales, minimums, out, residual, bias, partials, counters, M, N, K, GROUPS_PER_SPLIT,
               stride_x, stride_data, stride_out, stride_residual, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, AFFINE: tl.constexpr,
               RESIDUAL: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    HALF: tl.constexpr = GROUP // 2
    OFFSET: tl.constexpr = 0 if AFFINE else 8
    tile, split, m_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_offsets = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_safe = tl.minimum(n_offsets, N - 1)  # rows past the end are read again and not stored
    m_offsets = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = m_offsets < M
    columns = tl.arange(0, HALF)
    x_tile = x + m_offsets.to(tl.int64)[:, None] * stride_x + columns[None, :]
    data_tile = data + n_safe.to(tl.int64)[:, None] * stride_data + columns[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = split * GROUPS_PER_SPLIT
    last = tl.minimum(first + GROUPS_PER_SPLIT, K // GROUP)
    # Saying num_stages here, not at the launch alone, makes the scales travel ahead with the codes.
    for group in tl.range(first, last, num_stages=STAGES):
        scale, minimum = _group_scales(scales, minimums, group, n_safe, N, AFFINE)
        codes = tl.load(data_tile + group * HALF, eviction_policy="evict_first")
        low = tl.load(x_tile + group * GROUP, mask=m_mask[:, None], other=0.0)
        high = tl.load(x_tile + group * GROUP + HALF, mask=m_mask[:, None], other=0.0)
        product = tl.dot(_whole_numbers(codes & 15, OFFSET, low.dtype), tl.trans(low), input_precision="ieee")
        product = tl.dot(
            _whole_numbers(codes >> 4, OFFSET, low.dtype), tl.trans(high), product, input_precision="ieee"
        )
        acc += product * scale[:, None]
        if AFFINE:
            total = tl.sum(low.to(tl.float32), axis=1) + tl.sum(high.to(tl.float32), axis=1)
            acc += minimum[:, None] * total[None, :]

    is_last = True
    if SPLITS > 1:
        # As in skinny_linear: partial sums of one tile lie together; who arrives last adds them in order.
        CELLS: tl.constexpr = BLOCK_N * BLOCK_M
        place = m_tile * tl.num_programs(0) + tile
        cells = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        base = partials + place.to(tl.int64) * SPLITS * CELLS + cells
        tl.store(base + split * CELLS, acc, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's part is written before one thread says so
        is_last = tl.atomic_add(counters + place, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(SPLITS):
                acc += tl.load(base + other * CELLS, cache_modifier=".cg")
            tl.atomic_xchg(counters + place, 0, sem="relaxed")  # ready for the next launch

    if is_last:
        mask = (n_offsets < N)[:, None] & m_mask[None, :]
        if BIAS:
            acc += tl.load(bias + n_safe).to(tl.float32)[:, None]
        if RESIDUAL:
            places = residual + m_offsets.to(tl.int64)[None, :] * stride_residual + n_offsets[:, None]
            acc += tl.load(places, mask=mask, other=0.0).to(tl.float32)
        places = out + m_offsets.to(tl.int64)[None, :] * stride_out + n_offsets[:, None]
        tl.store(places, acc.to(out.dtype.element_ty), mask=mask)


def w4_linear(
    x: Tensor,
    weight: W4Weight,
    out: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
    config: W4Config | None = None,
) -> Tensor:
    """x [M, K] times a 4-bit weight [N, K] into `out`, which may be `residual`; made for M up to 64 or so."""
    m, k = x.shape
    n = weight.shape[0]
    if swiglu:
        both = w4_linear(x, weight, bias=bias, config=config)
        activated = swiglu_rows(both, out if residual is None else None)
        return activated if residual is None else torch.add(residual, activated, out=out)
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if config is None:
        config = default_config(m, n, k, weight.group)
    block_m = min(64, max(16, triton.next_power_of_2(m)))
    tiles, m_tiles = triton.cdiv(n, config.block_n), triton.cdiv(m, block_m)
    splits = min(config.splits, k // weight.group)
    while splits > 1 and tiles * m_tiles * splits * config.block_n * block_m > PARTIAL_FLOATS:
        splits //= 2
    partials, counters = workspace(x.device) if splits > 1 else (x, x)
    _w4_kernel[(tiles, splits, m_tiles)](
        x,
        weight.data,
        weight.scales,
        weight.scales if weight.minimums is None else weight.minimums,
        out,
        x if residual is None else residual,
        x if bias is None else bias,
        partials,
        counters,
        m,
        n,
        k,
        triton.cdiv(k // weight.group, splits),
        x.stride(0),
        weight.data.stride(0),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        GROUP=weight.group,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        STAGES=config.num_stages,
        AFFINE=weight.minimums is not None,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@torch.library.custom_op("cumulo::w4_linear", mutates_args=())
def w4_linear_op(x: Tensor, data: Tensor, scales: Tensor, minimums: Tensor | None, group: int) -> Tensor:
    return w4_linear(x, W4Weight(data, scales, minimums, group))


@w4_linear_op.register_fake
def _(x: Tensor, data: Tensor, scales: Tensor, minimums: Tensor | None, group: int) -> Tensor:
    return x.new_empty(x.shape[0], data.shape[0])


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
        weights = [W4Weight(first.data.clone(), first.scales, None, first.group) for _ in range(copies)]
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
