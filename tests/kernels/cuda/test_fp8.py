"""e4m3 weights and activations: codes against plain torch, products against the dequantised matrices."""

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.linear import fp8, fp8_quantise
from cumulo.kernels.cuda.linear.fp8 import Fp8Weight, fp8_linear_wide
from cumulo.kernels.cuda.linear.fp8_quantise import quantise
from cumulo.kernels.cuda.linear.skinny_linear import SkinnyConfig
from cumulo.kernels.cuda.linear.small_linear import SmallConfig
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.multiply import skinny_linear, small_linear
from tests.kernels.cuda.tolerance import relative_error

# An e4m3 number has 3 bits after the first: half a step is 1/16, and errors are spread evenly below that.
ROUNDING = 1 / 16


def draw(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("fusion", ["alone", "norm", "swiglu"])
@pytest.mark.parametrize("columns", [128, 200, 384])
def test_quantised_rows_are_what_torch_makes_of_them(
    in_blocks: bool, fusion: str, columns: int, device: torch.device
) -> None:
    x = draw(3, 2 * columns if fusion == "swiglu" else columns, device=device).half()
    norm = 1 + draw(columns, device=device, seed=1).half() / 4 if fusion == "norm" else None
    found = quantise(x, in_blocks=in_blocks, norm_weight=norm, eps=1e-5, swiglu=fusion == "swiglu")
    exact = fp8_quantise.reference(x, in_blocks, norm, 1e-5, fusion == "swiglu")
    assert torch.allclose(found.scales, exact.scales, rtol=1e-5)
    # A value between two codes may fall to either side; codes that differ must be neighbours, and rare.
    steps = (found.data.view(torch.uint8).int() - exact.data.view(torch.uint8).int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 0.02
    assert relative_error(found.dequantised(), exact.dequantised()) < ROUNDING / 4


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_row_of_zeros_stays_zero(in_blocks: bool, device: torch.device) -> None:
    rows = quantise(torch.zeros(2, 200, device=device, dtype=torch.float16), in_blocks=in_blocks)
    assert not rows.dequantised().any() and bool((rows.scales > 0).all())


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_weight_keeps_its_values_within_rounding_and_knows_its_bytes(
    in_blocks: bool, device: torch.device
) -> None:
    plain = draw(200, 300, device=device) * torch.logspace(-2, 2, 200, device=device)[:, None]
    weight = Fp8Weight.quantised(plain, in_blocks)
    assert relative_error(weight.dequantised(), plain) < ROUNDING
    assert weight.shape == (200, 300)
    assert weight.nbytes == 200 * 300 + 4 * (2 * 3 if in_blocks else 200)


def test_a_few_rows_times_an_8_bit_weight_are_exact_for_that_weight(device: torch.device) -> None:
    weight = Fp8Weight.quantised(draw(7, 100, device=device))
    x = draw(6, 100, device=device, seed=1).half()
    exact = x.double() @ weight.dequantised().double().t()
    small = small_linear(x[:2], weight, config=SmallConfig(2, 64, 2))
    skinny = skinny_linear(x, weight, config=SkinnyConfig(16, 32, 2, 4, 2))
    assert relative_error(small, exact[:2]) < 1e-3
    assert relative_error(skinny, exact) < 1e-3


@pytest.mark.parametrize("splits", [1, 2])
def test_block_scales_reach_the_right_blocks(splits: int, device: torch.device) -> None:
    plain = draw(256, 256, device=device) / 200
    plain[128:] *= 30
    plain[:, 128:] *= 20
    weight = Fp8Weight.quantised(plain, in_blocks=True)
    x = draw(5, 256, device=device, seed=1).half()
    config = SkinnyConfig(64, 64, splits, 4, 2)
    found = skinny_linear(x, weight, config=config)
    assert relative_error(found, x.double() @ weight.dequantised().double().t()) < 1e-3
    half = skinny_linear(x, weight, swiglu=True, config=config)
    gate, up = (x.float() @ weight.dequantised().t()).chunk(2, dim=1)
    assert relative_error(half, torch.nn.functional.silu(gate) * up) < 2e-3


def test_the_block_scaled_product_of_two_8_bit_matrices(device: torch.device) -> None:
    weight = Fp8Weight.quantised(draw(150, 200, device=device) * 3, in_blocks=True)
    x = quantise(draw(5, 200, device=device, seed=1).half() * 7, in_blocks=True)
    found = fp8.block_matmul(x.data, x.scales, weight.data, weight.scales, dtype=torch.float32, block_m=16)
    exact = fp8.block_reference(x.data, x.scales, weight.data, weight.scales)
    assert relative_error(found, exact) < 1e-5
    assert relative_error(found, x.dequantised().double() @ weight.dequantised().double().t()) < 1e-5


@pytest.mark.parametrize("in_blocks", [False, True])
def test_many_rows_are_close_to_the_product_in_full_precision(in_blocks: bool, device: torch.device) -> None:
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
        Fp8Weight.quantised(plain, in_blocks),
        stream,
        norm_weight=norm.to(dtype),
        residual=stream,
        swiglu=True,
    )
    gate, up = (torch.nn.functional.rms_norm(x.float(), (256,), norm.float(), 1e-6) @ plain.t()).chunk(
        2, dim=1
    )
    assert relative_error(stream, residual.float() + torch.nn.functional.silu(gate) * up) < 0.04


@pytest.mark.long
@pytest.mark.long
def test_on_hopper_blocks_are_multiplied_by_the_8_bit_matrix_unit() -> None:
    integers = ("M", "N", "K", "stride_x", "stride_w", "stride_out", "stride_x_scales", "stride_w_scales")
    (made,) = compile_for_sm90(
        [
            Case(
                kernel="cumulo.kernels.cuda.linear.fp8:_block_matmul_kernel",
                types={
                    **dict.fromkeys(("x", "weight"), "*fp8e4nv"),
                    **dict.fromkeys(("x_scales", "weight_scales"), "*fp32"),
                    **dict.fromkeys(integers, "i32:16"),
                    "out": "*bf16",
                },
                constants={"EVEN_K": True, "BLOCK_M": 128, "BLOCK_N": 128, "GROUP": 8, "STAGES": 4},
                num_warps=8,
                num_stages=4,
            )
        ]
    )
    made.check_fits()
    assert made.count("QGMMA") and made.count("LDGSTS")
