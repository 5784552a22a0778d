"""skinny_linear against plain torch: tiles that do not fit, splits of k, fusions, its machine code on Hopper."""

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.linear import skinny_linear as op
from cumulo.kernels.cuda.linear.product import reference
from cumulo.kernels.cuda.linear.skinny_linear import SkinnyConfig
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.multiply import inputs, skinny_linear
from tests.kernels.cuda.tolerance import check_close, poisoned

pytestmark = pytest.mark.long


def tiny(splits: int = 1) -> SkinnyConfig:
    return SkinnyConfig(block_n=16, block_k=32, splits=splits, num_warps=4, num_stages=2)


@pytest.mark.parametrize(("m", "n", "k"), [(5, 32, 128), (16, 20, 100), (17, 7, 72), (1, 33, 64)])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_the_product_is_as_exact_as_torch_for_any_shape_and_split(
    m: int, n: int, k: int, splits: int, device: torch.device
) -> None:
    given = inputs(m, n, k, device)
    out = poisoned(m, n, dtype=torch.float16, device=device)
    skinny_linear(given["x"], given["weight"], out, config=tiny(splits))
    check_close(out, reference, given["x"], given["weight"])


@pytest.mark.parametrize("splits", [1, 3])
def test_float32_is_computed_in_float32(splits: int, device: torch.device) -> None:
    given = inputs(6, 24, 96, device, torch.float32)
    out = skinny_linear(given["x"], given["weight"], config=tiny(splits))
    check_close(out, reference, given["x"], given["weight"])


@pytest.mark.parametrize("splits", [1, 2])
def test_norm_bias_and_residual_are_part_of_it_and_the_residual_may_be_the_output(
    splits: int, device: torch.device
) -> None:
    given = inputs(6, 20, 100, device)
    stream = given["residual"].clone()
    skinny_linear(
        given["x"],
        given["weight"],
        stream,
        norm_weight=given["norm"],
        eps=1e-5,
        residual=stream,
        bias=given["bias"],
        config=tiny(splits),
    )

    def exact(x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        return reference(x, weight, norm, 1e-5, residual, False, bias)

    check_close(stream, exact, *(given[name] for name in ("x", "weight", "norm", "residual", "bias")))


@pytest.mark.parametrize("splits", [1, 2])
def test_swiglu_pairs_each_gate_row_with_its_up_row(splits: int, device: torch.device) -> None:
    given = inputs(5, 40, 100, device)
    out = poisoned(5, 20, dtype=torch.float16, device=device)
    skinny_linear(
        given["x"],
        given["weight"],
        out,
        norm_weight=given["norm"],
        swiglu=True,
        bias=given["bias"],
        config=tiny(splits),
    )

    def exact(x: Tensor, weight: Tensor, norm: Tensor, bias: Tensor) -> Tensor:
        return reference(x, weight, norm, 1e-6, None, True, bias)

    check_close(out, exact, *(given[name] for name in ("x", "weight", "norm", "bias")))


def test_a_repeated_split_run_gives_the_same_bits_and_leaves_the_counters_at_zero(
    device: torch.device,
) -> None:
    given = inputs(6, 40, 256, device)
    runs = [skinny_linear(given["x"], given["weight"], config=tiny(4)) for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    assert not op.workspace(given["x"].device)[1].any()


def test_a_split_that_does_not_fit_the_workspace_is_not_made() -> None:
    assert op.splits_for(m=128, n=1 << 20, k=4096, block_n=64, block_k=64, swiglu=False) == 1
    assert op.splits_for(m=16, n=1024, k=4096, block_n=64, block_k=128, swiglu=False) > 1


def case(config: SkinnyConfig, m: int, weight: str = "*bf16", scaled: bool = False, **fusions: bool) -> Case:
    flags = {name: fusions.get(name.lower(), False) for name in ("NORM", "SWIGLU", "RESIDUAL", "BIAS")}
    integers = ("OUTPUTS", "K", "K_PER_SPLIT", "stride_x", "stride_weight", "stride_out", "stride_residual")
    return Case(
        kernel="cumulo.kernels.cuda.linear.skinny_linear:_skinny_linear_kernel",
        types={
            **dict.fromkeys(("x", "out", "norm_weight", "residual", "bias"), "*bf16"),
            **dict.fromkeys(integers, "i32:16"),
            **dict.fromkeys(("scales", "partials"), "*fp32"),
            "M": "i32",
            "counters": "*i32",
            "weight": weight,
            "eps": "fp32",
        },
        constants={
            **flags,
            "BLOCK_M": max(16, m),
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "SPLITS": config.splits,
            "EVEN_K": True,
            "SCALED": scaled,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@pytest.mark.long
@pytest.mark.long
def test_on_hopper_it_runs_on_the_wide_matrix_unit_with_asynchronous_loads() -> None:
    made = compile_for_sm90(
        [
            case(op.default_config(16, 4096, 4096), 16, residual=True),
            case(op.default_config(128, 6144, 4096), 128),
            case(op.default_config(16, 28672, 4096, True), 16, norm=True, swiglu=True),
            case(op.default_config(16, 6144, 4096), 16, weight="*fp8e4nv", scaled=True),
        ]
    )
    for compiled in made:
        compiled.check_fits()
        assert compiled.count("HGMMA") and compiled.count("LDGSTS")
        assert not compiled.count("F2F"), "a conversion at a quarter of the rate"
