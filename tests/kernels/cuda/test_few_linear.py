"""few_linear against plain torch, over shapes that do not fit its tiles, and its machine code for Hopper."""

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.linear import few_linear as op
from cumulo.kernels.cuda.linear.few_linear import FewConfig, few_linear
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.test_small_linear import inputs
from tests.kernels.cuda.tolerance import check_close, poisoned
from tests.thorough import rare


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 7, 100, FewConfig(2, 256, 1)),
        (3, 5, 300, FewConfig(2, 256, 1)),
        (4, 6, 576, FewConfig(1, 1024, 2)),
        (8, 3, 520, FewConfig(4, 512, 2)),
        (5, 6, 300, FewConfig(2, 256, 1, lines=2)),
        (4, 3, 576, FewConfig(1, 1024, 4, lines=1)),
        *rare((5, 8, 256, FewConfig(2, 256, 1)), (2, 9, 700, FewConfig(4, 256, 1))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, *rare(torch.float32)])
def test_the_product_is_as_exact_as_torch_for_any_shape(
    m: int, n: int, k: int, config: FewConfig, dtype: torch.dtype, device: torch.device
) -> None:
    given = inputs(m, n, k, device, dtype)
    out = poisoned(m, n, dtype=dtype, device=device)
    few_linear(given["x"], given["weight"], out, config=config)
    check_close(out, op.reference, given["x"], given["weight"])


@pytest.mark.parametrize(("m", "k"), [(2, 300), *rare((5, 256), (1, 576), (8, 100))])
@pytest.mark.parametrize(("swiglu", "lines"), [(False, 0), (True, 0), (True, 1)])
def test_norm_bias_swiglu_and_residual_are_part_of_it(
    m: int, k: int, swiglu: bool, lines: int, device: torch.device
) -> None:
    outputs = 5
    given = inputs(m, 2 * outputs if swiglu else outputs, k, device)
    stream = given["residual"][:, :outputs].contiguous()
    added = stream.clone()
    few_linear(
        given["x"], given["weight"], stream, norm_weight=given["norm"], eps=1e-5, residual=stream, swiglu=swiglu,
        bias=given["bias"], config=FewConfig(2, 256, 1, lines),
    )  # fmt: skip

    def exact(x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        return op.reference(x, weight, norm, 1e-5, residual, swiglu, bias)

    check_close(stream, exact, given["x"], given["weight"], given["norm"], added, given["bias"])


def test_rows_of_x_and_residual_can_be_picked(device: torch.device) -> None:
    given = inputs(6, 20, 200, device)
    picked = torch.tensor([4, 0, 5], dtype=torch.int32, device=device)
    out = poisoned(3, 20, dtype=torch.float16, device=device)
    few_linear(
        given["x"], given["weight"], out, residual=given["residual"], rows=picked, config=FewConfig(2, 256, 1)
    )

    def exact(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return op.reference(x[picked.long()], weight, residual=residual[picked.long()])

    check_close(out, exact, given["x"], given["weight"], given["residual"])


def test_more_rows_than_it_takes_are_refused(device: torch.device) -> None:
    given = inputs(9, 4, 64, device)
    with pytest.raises(ValueError, match="at most 8 rows"):
        few_linear(given["x"], given["weight"])


@pytest.mark.parametrize("m", [1, 4, 8])
def test_its_configurations_share_columns_among_warps_and_fit_into_registers(m: int) -> None:
    for n, k, swiglu in ((960, 576, False), (3072, 576, True), (576, 1536, False), (4096, 1024, False)):
        for config in op.candidates(m, n, k, swiglu):
            assert config.block_k >= 256 * config.num_warps


POINTERS = dict.fromkeys(("x", "weight", "out", "norm_weight", "residual", "bias"), "*bf16") | {
    "rows_of": "*i32"
}
STRIDES = dict.fromkeys(("OUTPUTS", "stride_x", "stride_weight", "stride_out", "stride_residual"), "i32:16")


def test_all_loads_are_16_bytes_and_nothing_goes_through_shared_memory_but_the_last_sums() -> None:
    """More rows of x and W share the reduction: a few exchanges, whatever their number."""
    cases = []
    for m, norm in ((1, True), (4, True), (8, False)):
        constants = {"M": m, "K": 576, "BLOCK_M": m, "ROWS": 2, "BLOCK_K": 1024, "EACH": 8, "NORM": norm,
                     "SWIGLU": False, "RESIDUAL": False, "BIAS": False, "PICK": False}  # fmt: skip
        cases.append(Case("cumulo.kernels.cuda.linear.few_linear:_few_linear_kernel",
                          POINTERS | STRIDES | {"eps": "fp32"}, constants, num_warps=1))  # fmt: skip
    for compiled in compile_for_sm90(cases):
        compiled.check_fits()
        assert compiled.count("LDG") == compiled.loads(128)
        assert compiled.count("STS") <= 2 and compiled.count("BAR") == 0


def test_weights_are_asked_for_before_it_waits_for_the_kernel_ahead() -> None:
    """... and nothing else is: what other kernels write is read behind the wait."""
    constants = {"M": 4, "K": 576, "BLOCK_M": 1, "ROWS": 2, "BLOCK_K": 1024, "EACH": 8, "NORM": True,
                 "SWIGLU": False, "RESIDUAL": True, "BIAS": False, "PICK": True, "EARLY": True}  # fmt: skip
    case = Case("cumulo.kernels.cuda.linear.few_linear:_few_linear_kernel", POINTERS | STRIDES | {"eps": "fp32"},
                constants, num_warps=4, options={"launch_pdl": True})  # fmt: skip
    (compiled,) = compile_for_sm90([case])
    before, wait, behind = compiled.sass.partition("ACQBULK")
    assert wait and before.count("LDG") == 3  # two rows of W and the norm's gains
    assert behind.count("LDG") >= 3 and "STG" not in before
