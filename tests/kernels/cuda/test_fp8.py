"""e4m3 weights and activations: codes against plain torch, products against the dequantised matrices."""

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.linear.fp8 import Fp8Weight, fp8_linear_wide, quantise, reference
from cumulo.kernels.cuda.linear.skinny_linear import SkinnyConfig
from cumulo.kernels.cuda.linear.small_linear import SmallConfig
from tests.kernels.cuda.multiply import skinny_linear, small_linear
from tests.kernels.cuda.tolerance import relative_error

# An e4m3 number has 3 bits after the first: half a step is 1/16, and errors are spread evenly below that.
ROUNDING = 1 / 16


def draw(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("columns", [128, 200, 384])
def test_quantised_rows_are_what_torch_makes_of_them(
    normed: bool, columns: int, device: torch.device
) -> None:
    x = draw(3, columns, device=device).half()
    norm = 1 + draw(columns, device=device, seed=1).half() / 4 if normed else None
    found = quantise(x, norm, 1e-5)
    exact = reference(x, norm, 1e-5)
    assert torch.allclose(found.scales, exact.scales, rtol=1e-5)
    # A value between two codes may fall to either side; codes that differ must be neighbours, and rare.
    steps = (found.data.view(torch.uint8).int() - exact.data.view(torch.uint8).int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 0.02
    assert relative_error(found.dequantised(), exact.dequantised()) < ROUNDING / 4


def test_a_row_of_zeros_stays_zero(device: torch.device) -> None:
    rows = quantise(torch.zeros(2, 200, device=device, dtype=torch.float16))
    assert not rows.dequantised().any() and bool((rows.scales > 0).all())


def test_a_weight_keeps_its_values_within_rounding_and_knows_its_bytes(device: torch.device) -> None:
    plain = draw(200, 300, device=device) * torch.logspace(-2, 2, 200, device=device)[:, None]
    weight = Fp8Weight.quantised(plain)
    assert relative_error(weight.dequantised(), plain) < ROUNDING
    assert weight.shape == (200, 300)
    assert weight.nbytes == 200 * 300 + 4 * 200


def test_a_few_rows_times_an_8_bit_weight_are_exact_for_that_weight(device: torch.device) -> None:
    weight = Fp8Weight.quantised(draw(7, 100, device=device))
    x = draw(6, 100, device=device, seed=1).half()
    exact = x.double() @ weight.dequantised().double().t()
    small = small_linear(x[:2], weight, config=SmallConfig(2, 64, 2))
    skinny = skinny_linear(x, weight, config=SkinnyConfig(16, 32, 2, 4, 2))
    assert relative_error(small, exact[:2]) < 1e-3
    assert relative_error(skinny, exact) < 1e-3


def test_many_rows_are_close_to_the_product_in_full_precision(device: torch.device) -> None:
    plain = draw(32, 256, device=device) / 16
    x = draw(20, 256, device=device, seed=1).half()
    norm, residual = (
        1 + draw(256, device=device, seed=2).half() / 4,
        draw(20, 16, device=device, seed=3).half(),
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the library's own output type
    stream = residual.clone().to(dtype)
    fp8_linear_wide(
        x.to(dtype),
        Fp8Weight.quantised(plain),
        stream,
        norm_weight=norm.to(dtype),
        residual=stream,
        swiglu=True,
    )
    gate, up = (torch.nn.functional.rms_norm(x.float(), (256,), norm.float(), 1e-6) @ plain.t()).chunk(
        2, dim=1
    )
    assert relative_error(stream, residual.float() + torch.nn.functional.silu(gate) * up) < 0.04
