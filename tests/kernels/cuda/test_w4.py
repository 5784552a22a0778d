"""4-bit weights: the packing, the rounding, and products that are exact for the packed matrix."""

import pytest
import torch

from cumulo.kernels.cuda.linear import w4
from cumulo.kernels.cuda.linear.w4 import W4Config
from cumulo.kernels.cuda.linear.w4_weight import W4Weight
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.multiply import inputs, w4_linear
from tests.kernels.cuda.tolerance import poisoned, relative_error

pytestmark = pytest.mark.long


def test_codes_come_back_as_they_were_packed() -> None:
    codes = torch.randint(0, 16, (5, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    weight = W4Weight.packed(codes, torch.ones(2, 5))
    assert torch.equal(weight.codes(), codes)
    assert torch.equal(weight.dequantised(), codes.float() - 8)
    assert weight.words.nbytes == 64 * 256 // 2 and weight.shape == codes.shape


def test_a_quantised_weight_is_within_a_step_of_the_original() -> None:
    plain = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
    plain[0, :128] = 0
    weight = W4Weight.quantised(plain)
    step = weight.scales.abs().t().repeat_interleave(128, 1)
    # The side away from the group's extreme has one code less, and is clamped by a step at most.
    assert bool(((weight.dequantised() - plain).abs() <= step + 1e-6).all())
    assert not weight.dequantised()[0, :128].abs().gt(1e-6).any()


def test_rows_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of 100 weights .* a multiple of 128"):
        W4Weight.quantised(torch.zeros(4, 100))


@pytest.mark.parametrize(("m", "n", "splits"), [(1, 16, 1), (5, 20, 2), (17, 33, 1)])
def test_the_product_is_exact_for_the_packed_matrix(
    m: int, n: int, splits: int, device: torch.device
) -> None:
    given = inputs(m, n, 384, device)
    weight = W4Weight.quantised(given["weight"])
    out = poisoned(m, n, dtype=torch.float16, device=device)
    w4_linear(given["x"], weight, out, config=W4Config(16, splits, 4, 2))
    assert relative_error(out, given["x"].double() @ weight.dequantised().double().t()) < 1e-3


def test_bias_residual_and_swiglu_are_part_of_it(device: torch.device) -> None:
    given = inputs(5, 32, 128, device)
    weight = W4Weight.quantised(given["weight"])
    config = W4Config(16, 2, 4, 2)
    stream = given["residual"].clone()
    w4_linear(given["x"], weight, stream, residual=stream, bias=given["bias"], config=config)
    exact = given["x"].double() @ weight.dequantised().double().t()
    assert relative_error(stream, given["residual"].double() + given["bias"].double() + exact) < 1e-3
    activated = w4_linear(given["x"], weight, swiglu=True, config=config)
    gate, up = exact.chunk(2, dim=1)
    assert relative_error(activated, torch.nn.functional.silu(gate) * up) < 2e-3


@pytest.mark.parametrize(("splits", "swiglu"), [(1, True), (2, True), (2, False)])
def test_the_norm_before_it_is_part_of_it(splits: int, swiglu: bool, device: torch.device) -> None:
    given = inputs(3, 40, 256, device)
    weight = W4Weight.quantised(given["weight"])
    gains = torch.rand(256, generator=torch.Generator().manual_seed(3)).to(device, torch.float16)
    x = given["x"].double()
    exact = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gains.double()
    exact = exact @ weight.dequantised().double().t() + given["bias"].double()
    if swiglu:
        gate, up = exact.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
    got = w4_linear(
        given["x"], weight, norm_weight=gains, eps=1e-5, bias=given["bias"], swiglu=swiglu,
        config=W4Config(16, splits, 4, 2),
    )  # fmt: skip
    assert relative_error(got, exact) < 2e-3


def test_more_rows_than_a_tile_are_computed_tile_by_tile(device: torch.device) -> None:
    given = inputs(70, 16, 128, device)
    weight = W4Weight.quantised(given["weight"])
    runs = [w4_linear(given["x"], weight, config=W4Config(16, 2, 4, 2)) for _ in range(2)]
    assert relative_error(runs[0], given["x"].double() @ weight.dequantised().double().t()) < 1e-3
    assert torch.equal(*runs)


@pytest.mark.long
def test_on_hopper_codes_become_matrix_operands_without_conversions() -> None:
    config = w4.default_config(16, 4096, 4096)
    integers = ("OUTPUTS", "N", "K", "stride_x", "stride_out", "stride_residual")
    cases = [
        Case(
            kernel="cumulo.kernels.cuda.linear.w4:_w4_kernel",
            types={
                **dict.fromkeys(("x", "out", "bias", "residual", "norm_weight"), "*bf16"),
                "eps": "fp32",
                **dict.fromkeys(("scales", "partials"), "*fp32"),
                **dict.fromkeys(integers, "i32:16"),
                **dict.fromkeys(("M", "STEPS_PER_SPLIT"), "i32"),
                "words": "*i16",
                "counters": "*i32",
            },
            constants={
                **dict.fromkeys(("RESIDUAL", "BIAS"), False),
                **dict.fromkeys(("NORM", "SWIGLU"), few),
                "EARLY": 2 if few else 0,
                "AHEAD": 2,
                "PAIRED": True,
                "BLOCK_M": 8 if few else 16,
                "BLOCK_N": config.block_n,
                "SPLITS": config.splits,
                "STAGES": config.num_stages,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        for few in (False, True)
    ]
    for made in compile_for_sm90(cases):
        made.check_fits()
        assert (made.count("HGMMA") or made.count("HMMA")) and made.count("LDGSTS") and not made.count("I2F")
