"""small_linear against plain torch, over shapes that do not fit its tiles, and its machine code for Hopper."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.linear import small_linear as op
from cumulo.kernels.cuda.linear.product import reference
from cumulo.kernels.cuda.linear.small_linear import SmallConfig
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.multiply import inputs, small_linear
from tests.kernels.cuda.tolerance import check_close, poisoned

pytestmark = pytest.mark.long

TINY = SmallConfig(rows=2, block_k=64, num_warps=2)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 128), (1, 7, 100), (2, 5, 96), (3, 6, 200), (4, 3, 72)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_product_is_as_exact_as_torch_for_any_shape(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    given = inputs(m, n, k, device, dtype)
    out = poisoned(m, n, dtype=dtype, device=device)
    small_linear(given["x"], given["weight"], out, config=TINY)
    check_close(out, reference, given["x"], given["weight"])


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("k", [128, 100])
def test_norm_bias_and_residual_are_part_of_it(m: int, k: int, device: torch.device) -> None:
    given = inputs(m, 6, k, device)
    out = poisoned(m, 6, dtype=torch.float16, device=device)
    small_linear(
        given["x"],
        given["weight"],
        out,
        norm_weight=given["norm"],
        eps=1e-5,
        residual=given["residual"],
        bias=given["bias"],
        config=TINY,
    )

    def exact(x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        return reference(x, weight, norm, 1e-5, residual, False, bias)

    check_close(out, exact, *(given[name] for name in ("x", "weight", "norm", "residual", "bias")))


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("outputs", [4, 5])
def test_swiglu_pairs_each_gate_row_with_its_up_row(m: int, outputs: int, device: torch.device) -> None:
    given = inputs(m, 2 * outputs, 100, device)
    out = poisoned(m, outputs, dtype=torch.float16, device=device)
    small_linear(
        given["x"],
        given["weight"],
        out,
        norm_weight=given["norm"],
        swiglu=True,
        bias=given["bias"],
        config=TINY,
    )

    def exact(x: Tensor, weight: Tensor, norm: Tensor, bias: Tensor) -> Tensor:
        return reference(x, weight, norm, 1e-6, None, True, bias)

    check_close(out, exact, *(given[name] for name in ("x", "weight", "norm", "bias")))


def test_the_residual_may_be_the_output_and_inputs_may_be_views(device: torch.device) -> None:
    given = inputs(2, 6, 128, device)
    wide = torch.cat([given["weight"], given["weight"]], dim=1)  # rows twice as far apart
    wide_x = torch.cat([given["x"], given["x"]], dim=1)
    stream = given["residual"].clone()
    small_linear(wide_x[:, :128], wide[:, 128:], stream, residual=stream, config=TINY)

    def exact(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return reference(x, weight, residual=residual)

    check_close(stream, exact, given["x"], given["weight"], given["residual"])


def test_a_repeated_run_gives_the_same_bits(device: torch.device) -> None:
    given = inputs(4, 6, 200, device)
    runs = [
        small_linear(given["x"], given["weight"], norm_weight=given["norm"], config=TINY) for _ in range(2)
    ]
    assert torch.equal(*runs)


def test_a_row_gets_the_same_bits_alone_and_among_others(device: torch.device) -> None:
    given = inputs(4, 6, 200, device)
    together = small_linear(given["x"], given["weight"], norm_weight=given["norm"], config=TINY)
    for row in range(4):
        alone = small_linear(
            given["x"][row : row + 1], given["weight"], norm_weight=given["norm"], config=TINY
        )
        assert torch.equal(alone[0], together[row])


def test_too_many_rows_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="at most 4 rows"):
        small_linear(torch.zeros(5, 8, device=device), torch.zeros(4, 8, device=device))


def case(config: SmallConfig, m: int, k: int, weight: str = "*bf16", **fusions: bool) -> Case:
    flags = {name: fusions.get(name.lower(), False) for name in ("NORM", "SWIGLU", "RESIDUAL", "BIAS")}
    pointers = ("x", "out", "norm_weight", "residual", "bias")
    integers = ("OUTPUTS", "stride_x", "stride_weight", "stride_out", "stride_residual")
    return Case(
        kernel="cumulo.kernels.cuda.linear.small_linear:_small_linear_kernel",
        types={
            **dict.fromkeys(pointers, "*bf16"),
            **dict.fromkeys(integers, "i32:16"),
            "weight": weight,
            "scales": "*fp32",
            "eps": "fp32",
        },
        constants={
            **flags,
            "M": m,
            "K": k,
            "ROWS": config.rows,
            "BLOCK_K": config.block_k,
            "EVEN_N": True,
            "SCALED": weight != "*bf16",
        },
        num_warps=config.num_warps,
    )


@pytest.mark.long
@pytest.mark.long
def test_on_hopper_every_weight_load_is_16_bytes() -> None:
    cases = [
        case(op.default_config(6144, 4096, False), 1, 4096, norm=True),
        case(op.default_config(28672, 4096, True), 1, 4096, norm=True, swiglu=True),
        case(op.default_config(4096, 4096, False), 4, 4096, residual=True),
        case(op.default_config(4096, 4096, False, 1), 1, 4096, weight="*fp8e4nv"),
    ]
    for made in compile_for_sm90(cases):
        made.check_fits()
        assert made.count("LDG") - made.loads(128) <= 4  # what is left: scales and residuals of a few rows


@pytest.mark.long
@pytest.mark.parametrize("weight", ["*bf16", "*fp8e4nv"])
def test_weights_are_asked_for_before_it_waits_for_the_kernel_ahead(weight: str) -> None:
    """... and nothing else is: what other kernels write is read behind the wait."""
    plain = case(SmallConfig(2, 512, 2), 1, 1024, weight, norm=True, residual=True)
    early = replace(plain, constants={**plain.constants, "EARLY": True}, options={"launch_pdl": True})
    plain_made, made = compile_for_sm90([plain, early])
    assert "ACQBULK" not in plain_made.sass
    before, wait, behind = made.sass.partition("ACQBULK")
    assert wait and "STG" not in before and behind.count("STG") == 1
    # W, two loads or one of 8 bits, the gains of the norm, and the scales; behind it x and the second tile.
    assert before.count("LDG") == 3
    assert before.count("LDG") + behind.count("LDG") == plain_made.count("LDG")


@pytest.mark.long
@pytest.mark.parametrize("order", [1, 2])
def test_the_next_kernel_may_start_before_the_wait_or_behind_it(order: int) -> None:
    plain = case(SmallConfig(2, 1024, 4), 1, 576)
    (made,) = compile_for_sm90(
        [replace(plain, constants={**plain.constants, "EARLY": order}, options={"launch_pdl": True})]
    )
    before, _, behind = made.sass.partition("ACQBULK")
    assert (before.count("PREEXIT"), behind.count("PREEXIT")) == ((1, 0) if order == 1 else (0, 1))
    assert before.count("LDG") == 2 and behind.count("LDG") > 0
