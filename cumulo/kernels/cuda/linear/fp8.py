"""fp8: weights in e4m3 with a scale a row or a 128×128 block, and the product with many rows. `linear` calls it.

Must move: one byte a weight, half of bfloat16. Up to some rows of x the weights are widened in registers and the
activations stay as they are (no quantisation, no error from it); beyond, activations are quantised a token at a
time and both go to the 8-bit tensor cores, twice the rate of bfloat16. Scaling by row is the vendor library's,
scaling by block (DeepSeek-V3, 2024, section 3.3) ours, in `fp8_block_matmul`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.kernels.cuda.elementwise.swiglu import swiglu as swiglu_rows
from cumulo.kernels.cuda.linear.fp8_block_matmul import block_matmul
from cumulo.kernels.cuda.linear.fp8_quantise import BLOCK, LARGEST, SMALLEST_SCALE, Fp8Rows, quantise
from cumulo.kernels.cuda.linear.skinny_linear import skinny_linear
from cumulo.kernels.cuda.linear.small_linear import BENCH_SHAPES, random_bf16, small_linear, work
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us
from cumulo.kernels.cuda.work import KernelRow


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix [N, K] in e4m3: scales [N], or [⌈N/128⌉, ⌈K/128⌉] where it is scaled in blocks."""

    data: Tensor
    scales: Tensor

    @classmethod
    def quantised(
        cls, weight: Tensor, in_blocks: bool = False, largest: Callable[[Tensor], Tensor] = lambda own: own
    ) -> "Fp8Weight":
        """The nearest e4m3 matrix, with the smallest scales that hold every weight. `largest`: of a matrix that
        other ranks have more columns of, the whole rows' largest weights, of this one's."""
        wide = weight.float()
        n, k = wide.shape
        if not in_blocks:
            scales = (largest(wide.abs().amax(1)) / LARGEST).clamp_min(SMALLEST_SCALE)
            return cls((wide / scales[:, None]).to(torch.float8_e4m3fn), scales)
        padded = F.pad(wide, (0, -k % BLOCK, 0, -n % BLOCK))
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        scales = (blocks.abs().amax((1, 3)) / LARGEST).clamp_min(SMALLEST_SCALE)
        data = (blocks / scales[:, None, :, None]).view(padded.shape)[:n, :k]
        return cls(data.to(torch.float8_e4m3fn).contiguous(), scales)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def in_blocks(self) -> bool:
        return self.scales.dim() == 2

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        n, k = self.data.shape
        scales = self.scales[:, None]
        if self.in_blocks:
            scales = self.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:n, :k]
        return (self.data.float() * scales).to(dtype)


def wide_matmul(x: Fp8Rows, weight: Fp8Weight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """x·Wᵀ with both in e4m3, for many rows."""
    if weight.in_blocks:
        return block_matmul(x.data, x.scales, weight.data, weight.scales, out=out, dtype=dtype)
    if not x.data.is_cuda:  # the library's row-wise product exists on GPUs only
        y = (x.dequantised() @ weight.dequantised().t()).to(dtype)
        return y if out is None else out.copy_(y)
    scales = (x.scales[:, None], weight.scales[None, :])
    if out is not None and out.is_contiguous() and out.dtype == dtype:
        torch._scaled_mm(x.data, weight.data.t(), *scales, out_dtype=dtype, use_fast_accum=True, out=out)
        return out
    y = torch._scaled_mm(x.data, weight.data.t(), *scales, out_dtype=dtype, use_fast_accum=True)
    return y if out is None else out.copy_(y)


def fp8_linear_wide(
    x: Tensor | Fp8Rows,
    weight: Fp8Weight,
    out: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product for many rows: norm and quantisation in one kernel, the product, then what comes after it.

    x may come quantised already (by `quantise`, say with SwiGLU); `dtype` is then the result's.
    """
    if isinstance(x, Tensor):
        dtype = x.dtype
        x = quantise(x, in_blocks=weight.in_blocks, norm_weight=norm_weight, eps=eps)
    elif norm_weight is not None:
        raise ValueError("rows that are quantised already cannot be normed any more")
    onto_out = out if not swiglu and residual is None else None
    y = wide_matmul(x, weight, dtype, onto_out)
    if bias is not None:
        y += bias
    if swiglu:
        y = swiglu_rows(y, out if residual is None else None)
    if residual is None:
        return y
    return torch.add(residual, y, out=out)


def bench_rows(device: torch.device | str = "cuda") -> Iterator[KernelRow]:
    """The products of an 8B model with 8-bit weights, by the kernel for so many rows, against bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    for name, n, k, _ in BENCH_SHAPES:
        if not name.startswith("Llama"):
            continue
        copies = copies_past_cache(n * k)
        plain = random_bf16(n, k, device=device, generator=generator, std=k**-0.5)
        first = Fp8Weight.quantised(plain)
        weights = [Fp8Weight(first.data.clone(), first.scales) for _ in range(copies)]
        exact_weight = first.dequantised(torch.float64)
        for m in (1, 16, 64, 256, 2048):
            x = random_bf16(m, k, device=device, generator=generator)
            out = torch.empty(m, n, dtype=x.dtype, device=device)

            def product(weight: Fp8Weight) -> Tensor:
                if m > 64:
                    return fp8_linear_wide(x, weight, out)
                kernel = small_linear if m <= 4 else skinny_linear
                return kernel(x, weight.data, out, scales=weight.scales)

            product(first)
            exact = x[:64].double() @ exact_weight.t()
            yield KernelRow(
                name="fp8_linear",
                shape=f"{name} m={m} n={n} k={k}",
                work=work(m, n, k, first.nbytes),
                ours_us=graph_us(lambda i: product(weights[i]), copies),
                rivals_us={"cuBLAS, bfloat16": graph_us(lambda i: F.linear(x, plain))},
                dtype="float8_e4m3fn" if m > 64 else "bfloat16",
                error=float((out[:64] - exact).norm() / exact.norm()),
                must_us=n * k / 3.6e6 if m == 1 else None,
            )
