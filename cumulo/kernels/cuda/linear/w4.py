"""w4: weights of 4 bits in groups that share a scale, and the product of 16-bit activations with them (W4A16).
`linear` calls `w4_linear`.

Must move: half a byte a weight and four bytes a group of 32, 64 or 128, about a quarter of bfloat16, so up to four
times the speed where reading weights is all the time. Then unpacking counts. A word of 16 bits has four codes; the
code in place j of words 0 to 31 belongs to column 32·j + word, so one place of 32 words is a tile of neighbouring
columns, which the tensor cores take as it is. A code put into the last bits of a power of two is that power plus
the code, for two weights an instruction. The scale multiplies a group's product, not every weight. 64 rows of 128
columns lie in one piece of 4 KiB, which a program reads in one go.
"""

from collections.abc import Iterable, Iterator
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
STEP = 128  # columns whose codes lie together
TILE = 64  # rows likewise


@dataclass(frozen=True, slots=True)
class W4Weight:
    """A matrix [N, K] in 4 bits: w = scale·(code − 8), or scale·code + minimum where minimums are given.

    words [N/64, K/128, 64, 32] int16, scales and minimums [K/group, N] float32 (a group's scales lie together).
    """

    words: Tensor
    scales: Tensor
    minimums: Tensor | None
    group: int

    @classmethod
    def quantised(cls, weight: Tensor, group: int = 128, affine: bool = False) -> "W4Weight":
        """The nearest codes under scales from each group's extremes. Scales are kept in float32: the asynchronous
        copies that bring them with the codes move no less than four bytes."""
        n, k = weight.shape
        check_group(k, group)
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
        check_group(k, group)
        codes = F.pad(codes, (0, 0, 0, -n % TILE)).view(-1, TILE, k // STEP, 4, 32)
        words = torch.zeros_like(codes[..., 0, :], dtype=torch.int16)
        for place in range(4):  # the last one reaches the sign, as it should
            words |= codes[..., place, :].to(torch.int16) << (4 * place)
        return cls(words.transpose(1, 2).contiguous(), scales, minimums, group)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.scales.shape[1], STEP * self.words.shape[1]))

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes + (0 if self.minimums is None else self.minimums.nbytes)

    def codes(self) -> Tensor:
        """[N, K] of 0..15."""
        n, k = self.shape
        rows = self.words.transpose(1, 2).reshape(-1, k // STEP, 1, 32)[:n]
        places = torch.arange(0, 16, 4, dtype=torch.int16, device=self.device).view(1, 1, 4, 1)
        return ((rows >> places) & 15).to(torch.uint8).reshape(n, k)

    def dequantised(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """The matrix [N, K], on a GPU by one pass over the codes."""
        n, k = self.shape
        if out is None:
            out = torch.empty((n, k), dtype=dtype, device=self.device)
        _dequantise[(triton.cdiv(n, TILE), k // STEP)](
            self.words, self.scales, self.scales if self.minimums is None else self.minimums, out, n, k,
            GROUP=self.group, AFFINE=self.minimums is not None,
        )  # fmt: skip
        return out


_SCRATCH: dict[torch.device, Tensor] = {}


def reserve_scratch(weights: Iterable[W4Weight], dtype: torch.dtype) -> int:
    """Memory in which any of these can be unpacked, before a graph is captured that does so; returns its bytes."""
    for weight in weights:
        held = _SCRATCH.get(weight.device)
        if held is None or held.numel() < weight.shape.numel() or held.dtype != dtype:
            _SCRATCH[weight.device] = torch.empty(weight.shape.numel(), dtype=dtype, device=weight.device)
    return sum(held.nbytes for held in _SCRATCH.values())


def in_scratch(weight: W4Weight, dtype: torch.dtype) -> Tensor:
    """The matrix unpacked, in memory that the next one will overwrite."""
    held = _SCRATCH.get(weight.device)
    if held is None or held.dtype != dtype or held.numel() < weight.shape.numel():
        return weight.dequantised(dtype)
    return weight.dequantised(dtype, held[: weight.shape.numel()].view(weight.shape))


def check_group(columns: int, group: int) -> None:
    if group not in GROUPS:
        raise ValueError(f"4-bit groups of {group} weights have no GPU kernel: choose one of {GROUPS}")
    if columns % STEP:
        raise ValueError(
            f"rows of {columns} weights have no 4-bit GPU kernel: they must be a multiple of {STEP}"
        )


@dataclass(frozen=True, slots=True)
class W4Config:
    block_n: int
    splits: int
    num_warps: int
    num_stages: int


def default_config(m: int, n: int, k: int, group: int, multiprocessors: int = 132) -> W4Config:
    """As many programs as all multiprocessors hold at once: a step is short, so others must run while one waits."""
    block_n, warps = (64, 2) if m <= 4 else (128, 4)
    splits = 1
    while triton.cdiv(n, block_n) * splits < 3 * multiprocessors and k // STEP // (2 * splits) >= 4:
        splits *= 2
    return W4Config(block_n, splits, warps, 3)


def candidates(m: int, n: int, k: int, group: int) -> list[W4Config]:
    """What `tune` tries."""
    default = default_config(m, n, k, group)
    found = [default]
    for block_n, warps, stages in ((128, 4, 3), (64, 2, 3), (128, 4, 5), (128, 8, 3), (64, 4, 3)):
        splits = max(1, default.splits * default.block_n // block_n)
        found += [
            W4Config(block_n, each, warps, stages)
            for each in (splits, 2 * splits, max(1, splits // 2))
            if k // STEP // each >= 2
        ]
    return list(dict.fromkeys(found))[:12]


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
def _add_place(numbers, x, product, total, m_mask, AFFINE: tl.constexpr):
    """Add one place's product, and where minimums want it the activations' sum."""
    values = tl.load(x, mask=m_mask[:, None], other=0.0)
    product = tl.dot(numbers, tl.trans(values), product, input_precision="ieee")
    if AFFINE:
        total += tl.sum(values.to(tl.float32), axis=1)
    return product, total


@triton.jit
def _end_group(acc, product, total, scales, minimums, place, AFFINE: tl.constexpr):
    """Scale a group's product into the sum; both begin anew."""
    acc += product * tl.load(scales + place)[:, None]
    if AFFINE:
        acc += tl.load(minimums + place)[:, None] * total[None, :]
    return acc, tl.zeros_like(product), tl.zeros_like(total)


@triton.jit
def _w4_kernel(x, words, scales, minimums, out, residual, bias, partials, counters, M, N, K, STEPS_PER_SPLIT,
               stride_x, stride_out, stride_residual, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, AFFINE: tl.constexpr,
               PAIRED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    OFFSET: tl.constexpr = 0 if AFFINE else 8
    PARTS: tl.constexpr = 128 // GROUP  # groups of a step
    tile, split, m_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_offsets = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_safe = tl.minimum(n_offsets, N - 1)  # rows past the end are read again and not stored
    m_offsets = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = m_offsets < M
    columns = tl.arange(0, 32)
    steps = K // 128
    x_tile = x + m_offsets.to(tl.int64)[:, None] * stride_x + columns[None, :]
    w_rows = (n_safe // 64).to(tl.int64) * steps * 2048 + (n_safe % 64) * 32
    w_tile = words + w_rows[:, None] + columns[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    product, total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    first = split * STEPS_PER_SPLIT
    last = tl.minimum(first + STEPS_PER_SPLIT, steps)
    # Saying num_stages here, not at the launch alone, makes the scales travel ahead with the codes.
    for step in tl.range(first, last, num_stages=STAGES):
        w = tl.load(w_tile + step * 2048, eviction_policy="evict_first")
        p0, p1, p2, p3 = _numbers(w, OFFSET, PAIRED, x.dtype.element_ty)
        xs = x_tile + step * 128
        place = step * PARTS * N + n_safe
        product, total = _add_place(p0, xs, product, total, m_mask, AFFINE)
        if PARTS == 4:
            acc, product, total = _end_group(acc, product, total, scales, minimums, place, AFFINE)
        product, total = _add_place(p1, xs + 32, product, total, m_mask, AFFINE)
        if PARTS >= 2:
            acc, product, total = _end_group(
                acc, product, total, scales, minimums, place + (PARTS // 2 - 1) * N, AFFINE
            )
        product, total = _add_place(p2, xs + 64, product, total, m_mask, AFFINE)
        if PARTS == 4:
            acc, product, total = _end_group(acc, product, total, scales, minimums, place + 2 * N, AFFINE)
        product, total = _add_place(p3, xs + 96, product, total, m_mask, AFFINE)
        acc, product, total = _end_group(
            acc, product, total, scales, minimums, place + (PARTS - 1) * N, AFFINE
        )

    is_last = True
    if SPLITS > 1:
        # As in skinny_linear: partial sums of one tile lie together; who arrives last adds them in order.
        CELLS: tl.constexpr = BLOCK_N * BLOCK_M
        where = m_tile * tl.num_programs(0) + tile
        cells = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        base = partials + where.to(tl.int64) * SPLITS * CELLS + cells
        tl.store(base + split * CELLS, acc, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's part is written before one thread says so
        is_last = tl.atomic_add(counters + where, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(SPLITS):
                acc += tl.load(base + other * CELLS, cache_modifier=".cg")
            tl.atomic_xchg(counters + where, 0, sem="relaxed")  # ready for the next launch

    if is_last:
        mask = (n_offsets < N)[:, None] & m_mask[None, :]
        if BIAS:
            acc += tl.load(bias + n_safe).to(tl.float32)[:, None]
        if RESIDUAL:
            places = residual + m_offsets.to(tl.int64)[None, :] * stride_residual + n_offsets[:, None]
            acc += tl.load(places, mask=mask, other=0.0).to(tl.float32)
        places = out + m_offsets.to(tl.int64)[None, :] * stride_out + n_offsets[:, None]
        tl.store(places, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dequantise(words, scales, minimums, out, N, K, GROUP: tl.constexpr, AFFINE: tl.constexpr):
    tile, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inside, columns = tl.arange(0, 64), tl.arange(0, 32)
    rows = tile * 64 + inside
    mask = rows < N
    piece = words + (tile * (K // 128) + step) * 2048
    w = tl.load(piece + inside[:, None] * 32 + columns[None, :])
    for j in tl.static_range(4):
        group = (step * 128 + 32 * j) // GROUP
        scale = tl.load(scales + group * N + rows, mask=mask, other=0.0)[:, None]
        code = ((w >> (4 * j)) & 15).to(tl.float32)
        if AFFINE:
            number = code * scale + tl.load(minimums + group * N + rows, mask=mask, other=0.0)[:, None]
        else:
            number = (code - 8) * scale
        places = out + rows[:, None] * K + step * 128 + 32 * j + columns[None, :]
        tl.store(places, number.to(out.dtype.element_ty), mask=mask[:, None])


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
    splits = min(config.splits, k // STEP)
    while splits > 1 and tiles * m_tiles * splits * config.block_n * block_m > PARTIAL_FLOATS:
        splits //= 2
    partials, counters = workspace(x.device) if splits > 1 else (x, x)
    _w4_kernel[(tiles, splits, m_tiles)](
        x,
        weight.words,
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
        triton.cdiv(k // STEP, splits),
        x.stride(0),
        out.stride(0),
        0 if residual is None else residual.stride(0),
        GROUP=weight.group,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        STAGES=config.num_stages,
        AFFINE=weight.minimums is not None,
        PAIRED=x.is_cuda and x.dtype == torch.bfloat16,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
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
