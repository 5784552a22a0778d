"""linear: the one door to every product with a weight on a GPU. The decoder calls it; a table says who does it.

A weight is a plain matrix, e4m3 (`Fp8Weight`) or 4 bits (`W4Weight`). For a few rows the kernels that stream
weights win, and norm, SwiGLU and residual come with the product; for many the vendor's library does, and they are
kernels of their own. Where the border lies was measured: `WINNERS` holds what `linear_tune.tune` found for the
shapes of a device, and those it does not know follow `_default`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm
from cumulo.kernels.cuda.elementwise.swiglu import swiglu as swiglu_rows
from cumulo.kernels.cuda.linear import few_dot as dots
from cumulo.kernels.cuda.linear import w4_dot as w4_dots
from cumulo.kernels.cuda.linear.few_dot import DotConfig, few_dot
from cumulo.kernels.cuda.linear.few_linear import SMALL_MATRIX, FewConfig, few_linear
from cumulo.kernels.cuda.linear.fp8 import Fp8Weight, fp8_linear_wide
from cumulo.kernels.cuda.linear.fp8_quantise import Fp8Rows
from cumulo.kernels.cuda.linear.invariant_matmul import invariant_matmul
from cumulo.kernels.cuda.linear.rotation import PagedRotation
from cumulo.kernels.cuda.linear.skinny_linear import (
    SkinnyConfig,
    ends_in_a_short_wave,
    skinny_linear,
    workspace,
)
from cumulo.kernels.cuda.linear.small_linear import BENCH_SHAPES, SmallConfig, random_bf16, small_linear, work
from cumulo.kernels.cuda.linear.w4 import W4Config, w4_linear
from cumulo.kernels.cuda.linear.w4_dot import W4DotConfig, w4_dot
from cumulo.kernels.cuda.linear.w4_weight import W4Weight, in_scratch
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us
from cumulo.kernels.cuda.work import KernelRow

Weight = Tensor | Fp8Weight | W4Weight
Config = SmallConfig | FewConfig | DotConfig | SkinnyConfig | W4Config | W4DotConfig

_CONFIGS: dict[str, type[Config]] = {
    "small": SmallConfig,
    "few": FewConfig,
    "dot": DotConfig,
    "skinny": SkinnyConfig,
    "w4": W4Config,
    "w4 dot": W4DotConfig,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Who computes a product: one of _CONFIGS with its configuration, or "library"."""

    kernel: str
    config: Config | None = None


_MULTIPROCESSORS = 132  # of an H100 or H200
ROW_CLASSES = (1, 2, 4, 8, 16, 64, 128)  # beyond, arithmetic takes the time and the library wins
W4_WIDE = 1 << 24  # weights: unpacking so many costs more than 256 rows of them
W4_FUSED_ROWS = 8  # of activations, that are normed by each of a 4-bit product's programs
WINNERS: dict[str, Choice] = {}


def shape_key(m: int, n: int, k: int, kind: str, swiglu: bool) -> str:
    """The class of shapes that share a choice: rows up to the next of ROW_CLASSES."""
    rows = next((rows for rows in ROW_CLASSES if rows >= m), "any")
    return f"{kind} m{rows} n{n} k{k}{' swiglu' if swiglu else ''}"


def winners() -> dict[str, Any]:
    """The table as JSON."""
    return {
        key: {"kernel": choice.kernel, "config": None if choice.config is None else asdict(choice.config)}
        for key, choice in WINNERS.items()
    }


def use_winners(rows: Mapping[str, Any]) -> None:
    """Take over what `winners` gave on the same kind of device."""
    for key, row in rows.items():
        config = None if row["config"] is None else _CONFIGS[row["kernel"]](**row["config"])
        WINNERS[key] = Choice(row["kernel"], config)


def save_winners(path: str | Path) -> None:
    Path(path).write_text(json.dumps(winners(), indent=1, sort_keys=True))


def load_winners(path: str | Path) -> None:
    use_winners(json.loads(Path(path).read_text()))


def prepare(device: torch.device | str) -> None:
    """Once per device, before any graph is captured: the kernels' scratch memory."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    workspace(device)


def kind_of(weight: Weight) -> str:
    if isinstance(weight, Fp8Weight):
        return "fp8 blocks" if weight.in_blocks else "fp8"
    if isinstance(weight, W4Weight):
        return f"w4g{weight.group}"
    return "bf16" if weight.dtype == torch.bfloat16 else str(weight.dtype).removeprefix("torch.")


def choose(m: int, weight: Weight, swiglu: bool = False) -> Choice:
    """Who computes m rows times this weight."""
    n, k = weight.shape
    kind = kind_of(weight)
    found = _measured(m, n, k, kind, swiglu)
    if found is None and not swiglu:
        # Where the library won a product with SwiGLU behind it, that is the product that is asked for here.
        paired = _measured(m, n, k, kind, True)
        found = paired if paired is not None and paired.kernel == "library" else None
    return _default(m, n, k, kind, swiglu) if found is None else found


def fuses(m: int, weight: Weight, swiglu: bool = False) -> bool:
    """Whether norm and SwiGLU of m rows come with the product at no cost, or are kernels of their own."""
    if isinstance(weight, W4Weight) and m > W4_FUSED_ROWS:
        return False
    return isinstance(weight, Fp8Weight) or choose(m, weight, swiglu).kernel != "library"


def rotates(m: int, weight: Weight, dtype: torch.dtype) -> bool:
    """Whether `linear` takes a `PagedRotation` for m rows of queries, keys and values, of heads of 32, 64, 96, ...:
    where that is faster than rope_cache behind the product."""
    if isinstance(weight, W4Weight) and not w4_dots.takes(m, weight.shape[1], dtype):
        return False
    return _rotating(m, weight) is not None


def _rotating(m: int, weight: Weight) -> Choice | None:
    n, k = weight.shape
    kind = kind_of(weight)
    found = WINNERS.get(f"{shape_key(m, n, k, kind, False)} rotated")
    if found is None and isinstance(weight, W4Weight) and weight.words.is_cuda and w4_dots.wins(m, k):
        return Choice("w4 dot")
    if (
        found is None
        and isinstance(weight, Tensor)
        and weight.is_cuda
        and _by_dots(m, n, k, kind)
        and k <= 1024
    ):
        return Choice("dot", dots.rotating_config())
    return found


def _by_dots(m: int, n: int, k: int, kind: str) -> bool:
    """Without a table: several rows of small matrices, in which it is not the memory that counts."""
    return kind in ("bf16", "float16") and m > 1 and dots.takes(m, k) and n * k <= SMALL_MATRIX


def _measured(m: int, n: int, k: int, kind: str, swiglu: bool) -> Choice | None:
    found = WINNERS.get(shape_key(m, n, k, kind, swiglu))
    if found is None and 4 < m <= 8:  # a class of its own only for small matrices
        found = WINNERS.get(shape_key(16, n, k, kind, swiglu))
    return found


def _default(m: int, n: int, k: int, kind: str, swiglu: bool = False) -> Choice:
    if kind.startswith("w4"):
        if w4_dots.wins(m, k, swiglu):
            return Choice("w4 dot")
        return Choice("w4" if m <= 128 or (m <= 256 and n * k >= W4_WIDE) else "library")
    if m == 1 and kind != "fp8 blocks":
        return _one_row(n, k, kind, swiglu)
    if _by_dots(m, n, k, kind):
        return Choice("dot", dots.default_config(m, n, k, swiglu))
    if not kind.startswith("fp8") and (
        (m <= 4 and n * k <= SMALL_MATRIX) or (m <= 8 and n * k <= SMALL_MATRIX // 8)
    ):
        return Choice("few")
    if kind.startswith("fp8"):
        return Choice("skinny" if m <= 64 else "library")  # above, the 8-bit tensor cores win
    if ends_in_a_short_wave(n, swiglu) and k < 8192:
        # Two programs on each multiprocessor make up for it where there are so few tiles and rows.
        paired = swiglu and m <= 8 and not ends_in_a_short_wave(n, swiglu, 2 * _MULTIPROCESSORS)
        return Choice("skinny" if paired else "library")
    return Choice("skinny" if m <= 16 else "library")


def _one_row(n: int, k: int, kind: str, swiglu: bool) -> Choice:
    """Plain multiply-adds keep up with the memory. Products of up to 16 MiB, and of twice as much where rows are
    long, start before the kernel ahead has ended; in larger ones the weights that wait in registers cost more than
    the start."""
    if n * k > 2 * SMALL_MATRIX:
        return Choice("small")
    if kind == "fp8":
        return Choice("small", SmallConfig(4, min(512, _power_of_2(k)), 2, early=True))
    if swiglu:
        early = k <= 2048
        return Choice("small", SmallConfig(2, min(512, _power_of_2(k)), 2, early=True) if early else None)
    return Choice("few" if n * k <= SMALL_MATRIX or k > 4096 else "small")


def _power_of_2(k: int) -> int:
    return 1 << (k - 1).bit_length()


def linear(
    x: Tensor | Fp8Rows,
    weight: Weight,
    out: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
    invariant: bool = False,
    parts: int = 1,
    rotation: PagedRotation | None = None,
) -> Tensor:
    """residual + f(norm(x)·Wᵀ + bias) into `out`, which may be `residual`; every part but the product is optional.

    x [M, K]; weight [N, K]; with `swiglu` f pairs the first half of the rows with the second and out is [M, N/2].
    `invariant`: a row's bits do not depend on the rows beside it (slower); nor, with `parts`, on how many ranks
    share the sum over K (`parts_of`). `rotation`: of queries, keys and values, where `rotates` says so; out has the
    rotated queries then, keys and values are on their pages.
    """
    if isinstance(x, Fp8Rows):
        if not isinstance(weight, Fp8Weight):
            raise ValueError("rows in e4m3 multiply a weight in e4m3 only")
        return fp8_linear_wide(x, weight, out, residual=residual, swiglu=swiglu, bias=bias)
    if invariant:
        return _invariant(x, weight, out, norm_weight, eps, residual, swiglu, bias, parts)
    choice = choose(x.shape[0], weight, swiglu)
    if rotation is not None:
        choice = _rotating(x.shape[0], weight) or Choice("w4 dot" if isinstance(weight, W4Weight) else "dot")
    if choice.kernel == "dot" and (x.is_cuda or rotation is not None):
        assert isinstance(weight, Tensor)
        return few_dot(
            x, weight, out, norm_weight=norm_weight, eps=eps, residual=residual, swiglu=swiglu, bias=bias,
            rotation=rotation, config=choice.config if isinstance(choice.config, DotConfig) else None,
        )  # fmt: skip
    if choice.kernel == "library":
        return _library(x, weight, out, norm_weight, eps, residual, swiglu, bias)
    if choice.kernel == "w4 dot" and (rotation is not None or (x.is_cuda and x.dtype == torch.bfloat16)):
        assert isinstance(weight, W4Weight)
        return w4_dot(
            x, weight, out, norm_weight=norm_weight, eps=eps, residual=residual, swiglu=swiglu, bias=bias,
            rotation=rotation, config=choice.config if isinstance(choice.config, W4DotConfig) else None,
        )  # fmt: skip
    if isinstance(weight, W4Weight):
        return w4_linear(
            x, weight, out, norm_weight=norm_weight, eps=eps, residual=residual, swiglu=swiglu, bias=bias,
            config=choice.config if isinstance(choice.config, W4Config) else None,
        )  # fmt: skip
    if choice.kernel in ("few", "dot"):  # no interpreter plays few_dot
        assert isinstance(weight, Tensor)
        return few_linear(
            x, weight, out, norm_weight=norm_weight, eps=eps, residual=residual, swiglu=swiglu, bias=bias,
            config=choice.config if isinstance(choice.config, FewConfig) else None,
        )  # fmt: skip
    data, scales = (weight.data, weight.scales) if isinstance(weight, Fp8Weight) else (weight, None)
    if choice.kernel == "small":
        return small_linear(
            x, data, out, norm_weight=norm_weight, eps=eps, residual=residual, swiglu=swiglu, bias=bias,
            scales=scales, config=choice.config if isinstance(choice.config, SmallConfig) else None,
        )  # fmt: skip
    return skinny_linear(
        x, data, out, norm_weight=norm_weight, eps=eps, residual=residual, swiglu=swiglu, bias=bias,
        scales=scales, config=choice.config if isinstance(choice.config, SkinnyConfig) else None,
    )  # fmt: skip


def _library(
    x: Tensor, weight: Weight, out: Tensor | None, norm_weight: Tensor | None, eps: float,
    residual: Tensor | None, swiglu: bool, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The vendor's product, with the other parts as kernels around it."""
    if isinstance(weight, Fp8Weight):
        return fp8_linear_wide(
            x, weight, out, norm_weight=norm_weight, eps=eps, residual=residual, swiglu=swiglu, bias=bias
        )
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    plain = _plain(weight, x.dtype)
    if swiglu:
        activated = swiglu_rows(F.linear(x, plain, bias), out if residual is None else None)
        return activated if residual is None else torch.add(residual, activated, out=out)
    if out is not None and out.dtype != x.dtype:  # a partial sum, kept wide
        torch.mm(x, plain.t(), out_dtype=out.dtype, out=out)
        for added in (residual, bias):
            if added is not None:
                out += added
        return out
    if residual is not None:
        if bias is not None:
            residual = residual + bias
        # The library adds onto what is in the output while it stores; this costs no pass.
        return (
            torch.addmm(residual, x, plain.t(), out=out)
            if out is not None
            else torch.addmm(residual, x, plain.t())
        )
    if bias is not None:
        return torch.addmm(bias, x, plain.t(), out=out) if out is not None else F.linear(x, plain, bias)
    return torch.mm(x, plain.t(), out=out) if out is not None else x @ plain.t()


def _plain(weight: Tensor | W4Weight, dtype: torch.dtype) -> Tensor:
    """A matrix the library can multiply: of 4 bits, unpacked into memory that all of them share."""
    return in_scratch(weight, dtype) if isinstance(weight, W4Weight) else weight


def _invariant(
    x: Tensor, weight: Weight, out: Tensor | None, norm_weight: Tensor | None, eps: float,
    residual: Tensor | None, swiglu: bool, bias: Tensor | None, parts: int,
) -> Tensor:  # fmt: skip
    """One kernel for every number of rows; what surrounds it works a row at a time anyway."""
    if isinstance(weight, Fp8Weight) and weight.in_blocks:
        raise ValueError("weights scaled in blocks have no batch-invariant product: use one scale a row")
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if isinstance(weight, Fp8Weight):
        data, scales = weight.data, weight.scales
    else:
        data, scales = _plain(weight, x.dtype), None
    if not swiglu:
        return invariant_matmul(x, data, out, bias=bias, scales=scales, residual=residual, parts=parts)
    y = invariant_matmul(x, data, bias=bias, scales=scales, parts=parts)
    y = swiglu_rows(y, out if residual is None else None)
    return y if residual is None else torch.add(residual, y, out=out)


def bench_rows(device: torch.device | str = "cuda") -> Iterator[KernelRow]:
    """Decode products as the decoder asks for them, by the winners in the table, against the library's."""
    prepare(device)
    generator = torch.Generator(device).manual_seed(0)
    for name, n, k, must_us in BENCH_SHAPES:
        copies = copies_past_cache(2 * n * k)
        weights = [random_bf16(n, k, device=device, generator=generator, std=k**-0.5) for _ in range(copies)]
        for m in (1, 4, 16, 64):
            x = random_bf16(m, k, device=device, generator=generator)
            out = linear(x, weights[0])
            exact = x.double() @ weights[0].double().t()
            yield KernelRow(
                name="linear",
                shape=f"{name} m={m} n={n} k={k}",
                work=work(m, n, k, 2 * n * k),
                ours_us=graph_us(lambda i: linear(x, weights[i], out), copies),
                rivals_us={"cuBLAS": graph_us(lambda i: F.linear(x, weights[i]), copies)},
                config=str(choose(m, weights[0])),
                error=float((out - exact).norm() / exact.norm()),
                must_us=must_us if m == 1 else None,
            )
