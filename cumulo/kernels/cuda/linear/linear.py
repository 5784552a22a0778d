"""linear: every product with a weight on a GPU goes through it. The decoder calls it; a table says who computes it.

A weight is a plain matrix, e4m3 (`Fp8Weight`) or 4 bits (`W4Weight`). For a few rows the kernels that stream
weights win, and norm, SwiGLU and residual come with the product; for many the vendor's library does, and they are
kernels of their own. Where the border lies was measured: `WINNERS` holds what was found for the
shapes of a device (`cumulo bench kernels --tune`), and those it does not know follow `_default`.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm
from cumulo.kernels.cuda.elementwise.swiglu import swiglu as swiglu_rows
from cumulo.kernels.cuda.linear import few_dot, skinny_linear, small_linear, w4, w4_dot
from cumulo.kernels.cuda.linear.few_dot import DotConfig
from cumulo.kernels.cuda.linear.fp8 import Fp8Weight, fp8_linear_wide
from cumulo.kernels.cuda.linear.invariant_matmul import invariant_matmul
from cumulo.kernels.cuda.linear.product import SMALL_MATRIX, PagedRotation, Product, Weight
from cumulo.kernels.cuda.linear.skinny_linear import SkinnyConfig, ends_in_a_short_wave, workspace
from cumulo.kernels.cuda.linear.small_linear import SmallConfig
from cumulo.kernels.cuda.linear.w4 import W4Config
from cumulo.kernels.cuda.linear.w4_dot import W4DotConfig
from cumulo.kernels.cuda.linear.w4_weight import W4Weight, in_scratch

Config = SmallConfig | DotConfig | SkinnyConfig | W4Config | W4DotConfig

# The kernels for few rows, by their names in the table: how each is configured, and what launches it.
KERNELS: dict[str, tuple[type[Config], Callable[[Product, Any], None]]] = {
    "small": (SmallConfig, small_linear.launch),
    "dot": (DotConfig, few_dot.launch),
    "skinny": (SkinnyConfig, skinny_linear.launch),
    "w4": (W4Config, w4.launch),
    "w4 dot": (W4DotConfig, w4_dot.launch),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Who computes a product: one of KERNELS with its configuration (None: by rule), or "library"."""

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
        config = None if row["config"] is None else KERNELS[row["kernel"]][0](**row["config"])
        WINNERS[key] = Choice(row["kernel"], config)


def prepare(device: torch.device | str) -> None:
    """Once per device, before any graph is captured: the kernels' scratch memory."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    workspace(device)


def kind_of(weight: Weight) -> str:
    if isinstance(weight, Fp8Weight):
        return "fp8"
    if isinstance(weight, W4Weight):
        return "w4"
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
    if isinstance(weight, W4Weight) and not w4_dot.takes(m, weight.shape[1], dtype):
        return False
    return _rotating(m, weight) is not None


def _rotating(m: int, weight: Weight) -> Choice | None:
    n, k = weight.shape
    kind = kind_of(weight)
    found = WINNERS.get(f"{shape_key(m, n, k, kind, False)} rotated")
    if found is None and isinstance(weight, W4Weight) and weight.words.is_cuda and w4_dot.wins(m, k):
        return Choice("w4 dot")
    if (
        found is None
        and isinstance(weight, Tensor)
        and weight.is_cuda
        and _by_dots(m, n, k, kind)
        and k <= 1024
    ):
        return Choice("dot", few_dot.rotating_config(k))
    return found


def _by_dots(m: int, n: int, k: int, kind: str) -> bool:
    """Without a table: several rows of small matrices, in which it is not the memory that counts."""
    return kind in ("bf16", "float16") and m > 1 and few_dot.takes(m, k) and n * k <= SMALL_MATRIX


def _measured(m: int, n: int, k: int, kind: str, swiglu: bool) -> Choice | None:
    found = WINNERS.get(shape_key(m, n, k, kind, swiglu))
    if found is None and 4 < m <= 8:  # a class of its own only for small matrices
        found = WINNERS.get(shape_key(16, n, k, kind, swiglu))
    return found


def _default(m: int, n: int, k: int, kind: str, swiglu: bool = False) -> Choice:
    if kind == "w4":
        if w4_dot.wins(m, k, swiglu):
            return Choice("w4 dot")
        return Choice("w4" if m <= 128 or (m <= 256 and n * k >= W4_WIDE) else "library")
    if m == 1:
        return _one_row(n, k, kind, swiglu)
    if _by_dots(m, n, k, kind):
        return Choice("dot", few_dot.default_config(m, n, k, swiglu))
    if m <= small_linear.MAX_ROWS and n * k <= SMALL_MATRIX and kind != "fp8":
        return Choice("small")
    if kind == "fp8":
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
    if n * k > SMALL_MATRIX and k <= 4096:
        return Choice("small")
    whole = max(256, _power_of_2(k))
    return Choice(
        "small", SmallConfig(*((4, whole, whole // 256) if k <= 1024 else (2, 2048, 8)), early=True)
    )


def _power_of_2(k: int) -> int:
    return 1 << (k - 1).bit_length()


def linear(
    x: Tensor,
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
    choice: Choice | None = None,
) -> Tensor:
    """residual + f(norm(x)·Wᵀ + bias) into `out`, which may be `residual`; every part but the product is optional.

    x [M, K]; weight [N, K]; with `swiglu` f pairs the first half of the rows with the second and out is [M, N/2].
    `invariant`: a row's bits do not depend on the rows beside it (slower); nor, with `parts`, on how many ranks
    share the sum over K (`parts_of`). `rotation`: of queries, keys and values, where `rotates` says so; out has the
    rotated queries then, keys and values are on their pages. `choice`: who computes it; None: as measured or by
    rule.
    """
    product = Product(x, weight, out, norm_weight, eps, residual, swiglu, bias, rotation)
    if invariant:
        return _invariant(product, parts)
    if choice is None and rotation is not None:
        choice = _rotating(len(x), weight) or Choice("w4 dot" if isinstance(weight, W4Weight) else "dot")
    elif choice is None:
        choice = _playable(choose(len(x), weight, swiglu), x)
    if choice.kernel == "library":
        return _library(product)
    if out is None:
        out = torch.empty((len(x), product.outputs), dtype=x.dtype, device=x.device)
        product = replace(product, out=out)
    _, launch = KERNELS[choice.kernel]
    launch(product, choice.config)
    return out


def _playable(choice: Choice, x: Tensor) -> Choice:
    """Another kernel where x cannot be this one's: no interpreter plays Gluon, and `w4 dot` takes bfloat16 only."""
    if choice.kernel == "w4 dot" and not (x.is_cuda and x.dtype == torch.bfloat16):
        return Choice("w4")
    if choice.kernel == "dot" and not x.is_cuda:
        return Choice("small" if len(x) <= small_linear.MAX_ROWS else "skinny")
    return choice


def _library(product: Product) -> Tensor:
    """The vendor's product, with the other parts as kernels around it."""
    x, weight, out, residual, bias = product.x, product.weight, product.out, product.residual, product.bias
    if isinstance(weight, Fp8Weight):
        return fp8_linear_wide(
            x, weight, out, norm_weight=product.norm_weight, eps=product.eps, residual=residual,
            swiglu=product.swiglu, bias=bias,
        )  # fmt: skip
    if product.norm_weight is not None:
        x = rms_norm(x, product.norm_weight, product.eps)
    plain = _plain(weight, x.dtype)
    if product.swiglu:
        return _activated(F.linear(x, plain, bias), product)
    if out is not None and out.dtype != x.dtype:  # a partial sum, kept wide
        torch.mm(x, plain.t(), out_dtype=out.dtype, out=out)
        for added in (residual, bias):
            if added is not None:
                out += added
        return out
    if residual is not None and bias is not None:
        residual = residual + bias
    # The library adds onto what is in the output while it stores; this costs no pass.
    added = bias if residual is None else residual
    return torch.mm(x, plain.t(), out=out) if added is None else torch.addmm(added, x, plain.t(), out=out)


def _activated(gate_up: Tensor, product: Product) -> Tensor:
    """SwiGLU, and what comes behind it."""
    residual, out = product.residual, product.out
    y = swiglu_rows(gate_up, out if residual is None else None)
    return y if residual is None else torch.add(residual, y, out=out)


def _plain(weight: Tensor | W4Weight, dtype: torch.dtype) -> Tensor:
    """A matrix the library can multiply: of 4 bits, unpacked into memory that all of them share."""
    return in_scratch(weight, dtype) if isinstance(weight, W4Weight) else weight


def _invariant(product: Product, parts: int) -> Tensor:
    """One kernel for every number of rows; what surrounds it works a row at a time anyway."""
    x, weight, bias = product.x, product.weight, product.bias
    if product.norm_weight is not None:
        x = rms_norm(x, product.norm_weight, product.eps)
    if isinstance(weight, Fp8Weight):
        data, scales = weight.data, weight.scales
    else:
        data, scales = _plain(weight, x.dtype), None
    if product.swiglu:
        return _activated(invariant_matmul(x, data, bias=bias, scales=scales, parts=parts), product)
    return invariant_matmul(
        x, data, product.out, bias=bias, scales=scales, residual=product.residual, parts=parts
    )
