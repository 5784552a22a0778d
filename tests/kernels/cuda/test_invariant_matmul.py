"""invariant_matmul: as exact as torch, and a row's bits do not depend on the rows beside it."""

from dataclasses import replace

import pytest
import torch

from cumulo.kernels.cuda.linear import invariant_matmul as op
from cumulo.kernels.cuda.linear.fp8 import Fp8Weight
from cumulo.kernels.cuda.linear.invariant_matmul import (
    FEW_ROWS,
    LONG_COLUMN,
    MANY_ROWS,
    SHORT_COLUMN,
    SOME_ROWS,
    InvariantConfig,
    config_for,
    invariant_matmul,
)
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.multiply import inputs
from tests.kernels.cuda.tolerance import check_close, poisoned, relative_error
from tests.thorough import rare

pytestmark = pytest.mark.long

TINY = InvariantConfig(16, 16, 32, 4, 2)
SWAPPED = InvariantConfig(16, 16, 32, 4, 2, swapped=True)


@pytest.mark.long
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 64), (17, 20, 100), (40, 7, 72)])
@pytest.mark.parametrize(
    ("dtype", "config"), [(torch.float16, TINY), (torch.float32, TINY), (torch.float16, SWAPPED)]
)
def test_the_product_is_as_exact_as_torch_for_any_shape(
    m: int, n: int, k: int, dtype: torch.dtype, config: InvariantConfig, device: torch.device
) -> None:
    given = inputs(m, n, k, device, dtype)
    out = poisoned(m, n, dtype=dtype, device=device)
    invariant_matmul(given["x"], given["weight"], out, bias=given["bias"], config=config)
    check_close(out, op.reference, given["x"], given["weight"], given["bias"])


def test_operands_may_be_transposed_views(device: torch.device) -> None:
    given = inputs(20, 24, 40, device)
    found = invariant_matmul(
        given["x"].t().contiguous().t(), given["weight"].t().contiguous().t(), config=TINY
    )
    check_close(found, op.reference, given["x"], given["weight"])


@pytest.mark.parametrize("rows", [slice(17, 18), slice(5, 30), *rare(slice(0, 1), slice(39, 40))])
def test_a_row_has_the_same_bits_alone_and_in_any_company(rows: slice, device: torch.device) -> None:
    given = inputs(40, 24, 100, device)
    config = None if device.type == "cuda" else TINY
    together = invariant_matmul(given["x"], given["weight"], config=config)
    assert torch.equal(invariant_matmul(given["x"][rows], given["weight"], config=config), together[rows])
    turned = invariant_matmul(given["x"].flip(0), given["weight"], config=config)
    assert torch.equal(turned.flip(0), together)


def in_pairs(sums: list[torch.Tensor]) -> torch.Tensor:
    while len(sums) in (2, 4, 8):
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sum(sums[1:], sums[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "ranks"), [(4, 2), (4, 4), (3, 3), (8, 8), (8, 2), (6, 6), *rare((2, 2), (8, 4))]
)
@pytest.mark.parametrize("at_once", [2, 512])  # rows
def test_ranks_that_share_the_sum_have_the_bits_of_one(
    parts: int, ranks: int, at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "_ROWS_AT_ONCE", at_once)
    config = InvariantConfig(16, 32, 16, 4, 2)
    given = inputs(5, 24, 16 * 24, device, torch.float32)
    x, weight, bias = given["x"], given["weight"], given["bias"]
    whole = invariant_matmul(x, weight, bias=bias, parts=parts, config=config)
    sums = [
        invariant_matmul(
            x.chunk(ranks, 1)[rank], weight.chunk(ranks, 1)[rank], bias=bias if rank == 0 else None,
            parts=parts // ranks, config=config,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    assert torch.equal(in_pairs(sums), whole)
    # Three parts are three roundings where the library's one run has one.
    check_close(whole, op.reference, x, weight, bias, slack=4.0)


@pytest.mark.parametrize(("parts", "ranks"), [(4, 2), (8, 8)])
def test_ranks_that_share_a_sum_of_8_bit_weights_have_the_bits_of_one(
    parts: int, ranks: int, device: torch.device
) -> None:
    config = InvariantConfig(16, 32, 16, 4, 2)
    given = inputs(5, 24, 16 * 24, device, torch.float32)
    x, cuts = given["x"].chunk(ranks, 1), given["weight"].chunk(ranks, 1)
    largest = given["weight"].abs().amax(1)  # what ranks tell each other
    whole = Fp8Weight.quantised(given["weight"])
    expected = invariant_matmul(given["x"], whole.data, scales=whole.scales, parts=parts, config=config)
    sums = []
    for one, cut in zip(x, cuts, strict=True):
        weight = Fp8Weight.quantised(cut, largest=lambda own: largest)
        assert weight.scales.equal(whole.scales)
        sums.append(
            invariant_matmul(one, weight.data, scales=weight.scales, parts=parts // ranks, config=config)
        )
    assert torch.equal(in_pairs(sums), expected)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("at_once", [8, 512])
def test_a_residual_is_added_to_the_rounded_product(
    parts: int, at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "_ROWS_AT_ONCE", at_once)
    given = inputs(18, 20, 64, device, torch.float16)
    product = invariant_matmul(given["x"], given["weight"], parts=parts, config=TINY)
    stream = given["residual"].clone()
    found = invariant_matmul(given["x"], given["weight"], stream, residual=stream, parts=parts, config=TINY)
    assert found is stream and torch.equal(stream, given["residual"] + product)


def test_weights_in_8_bits_are_scaled_by_row(device: torch.device) -> None:
    given = inputs(6, 20, 64, device)
    weight = Fp8Weight.quantised(given["weight"])
    found = invariant_matmul(given["x"], weight.data, scales=weight.scales, config=TINY)
    assert relative_error(found, given["x"].double() @ weight.dequantised().double().t()) < 1e-3


def test_tiles_are_the_largest_that_occupy_the_device() -> None:
    shapes = [(1, 28672, 1), (20, 1024, 4), (64, 28672, 1), (128, 28672, 1), (256, 4096, 4), (128, 1024, 4)]
    found = [config_for(m, n, torch.bfloat16, parts) for m, n, parts in shapes]
    assert found == [LONG_COLUMN, replace(SHORT_COLUMN, block_m=32), FEW_ROWS, SOME_ROWS, MANY_ROWS, FEW_ROWS]
    assert len({config.block_k for config in found}) == 1  # which bears on the bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks what the tensor cores do")
@pytest.mark.parametrize("k", [1024, 4096, 4100])
def test_small_and_large_tiles_give_the_same_bits_on_the_tensor_cores(k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(k)
    x = torch.randn(700, k, device="cuda", generator=generator, dtype=torch.bfloat16)
    weight = torch.randn(1000, k, device="cuda", generator=generator, dtype=torch.bfloat16)
    many = invariant_matmul(x, weight, config=MANY_ROWS)
    for config in (FEW_ROWS, SOME_ROWS, LONG_COLUMN, SHORT_COLUMN):
        assert torch.equal(invariant_matmul(x, weight, config=config), many)
    for rows in (slice(0, 1), slice(3, 20), slice(40, 80), slice(100, 164), slice(500, 700)):
        assert torch.equal(invariant_matmul(x[rows], weight), many[rows])
    eight = Fp8Weight.quantised(weight)
    many = invariant_matmul(x, eight.data, scales=eight.scales, config=MANY_ROWS)
    for rows in (slice(0, 1), slice(3, 20), slice(100, 164), slice(500, 700)):
        assert torch.equal(invariant_matmul(x[rows], eight.data, scales=eight.scales), many[rows])


@pytest.mark.long
def test_on_hopper_all_tiles_fit_and_use_the_wide_matrix_unit() -> None:
    def case(config: InvariantConfig, weight: str, parts: int = 1) -> Case:
        integers = ("M", "N", "K", "stride_xm", "stride_wn", "stride_out", "stride_residual", "stride_part")
        return Case(
            kernel="cumulo.kernels.cuda.linear.invariant_matmul:_invariant_matmul_kernel",
            types={
                **dict.fromkeys(("x", "bias", "residual"), "*bf16"),
                "out": "*fp32" if parts > 1 else "*bf16",
                **dict.fromkeys(integers, "i32:16"),
                "weight": weight,
                "scales": "*fp32",
            },
            constants={
                **dict.fromkeys(("stride_xk", "stride_wk"), 1),
                **dict.fromkeys(("BIAS", "SCALED"), False),
                "RESIDUAL": parts == 1,
                "PARTS": parts,
                "EVEN_K": True,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_K": config.block_k,
                "GROUP": op.GROUP,
                "SWAPPED": config.swapped,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    for made in compile_for_sm90(
        [
            case(MANY_ROWS, "*bf16"),
            case(MANY_ROWS, "*bf16", 4),
            case(FEW_ROWS, "*bf16"),
            case(FEW_ROWS, "*bf16", 4),
            case(FEW_ROWS, "*fp8e4nv"),
            case(SOME_ROWS, "*bf16"),
            case(SOME_ROWS, "*fp8e4nv"),
            case(LONG_COLUMN, "*bf16"),
            case(replace(LONG_COLUMN, block_m=32), "*fp8e4nv"),
            case(SHORT_COLUMN, "*bf16", 4),
        ]
    ):
        made.check_fits()
        assert made.count("HGMMA") and made.count("LDGSTS.E.BYPASS.128")
