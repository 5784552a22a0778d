"""Dense attention at real sizes: on a GPU in bfloat16, and compiled for Hopper where there is none."""

from typing import Any

import pytest
import torch

from cumulo.bench.gpu.attention import CHECKED, DenseBench
from cumulo.bench.gpu.tune import BACKWARD, FORWARD
from cumulo.kernels.cuda.attention import flash_attention as door
from cumulo.kernels.cuda.attention.flash_attention_backward import BackwardConfig, default_backward
from cumulo.kernels.cuda.attention.flash_attention_forward import ForwardConfig, default_forward
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.tolerance import relative_error

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes take a GPU")
HALF = torch.bfloat16


def allowed(case: DenseBench) -> list[float]:
    """Twice what torch in the same type loses, for the output and each gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in (case.query, case.key, case.value)]
    q, k, v = leaves
    out, _ = door.reference(q, k, v, case.starts, case.starts, True, case.dim**-0.5)
    same = [out.detach(), *torch.autograd.grad(out, leaves, case.grad_out)]
    return [2 * max(relative_error(x, y), 2**-9) for x, y in zip(same, case.exact(), strict=True)]


def check(case: DenseBench, forward: ForwardConfig, backward: tuple[BackwardConfig, BackwardConfig]) -> None:
    case.forward(forward)
    case.backward(*backward)
    found = [case.out, *case.grads]
    for tensor, right, limit in zip(found, case.exact(), allowed(case), strict=True):
        assert relative_error(tensor, right) <= limit
    before = [x.clone() for x in found]
    case.forward(forward)
    case.backward(*backward)
    assert all(torch.equal(x, y) for x, y in zip(found, before, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (8, 8, 64), (4, 1, 80), (2, 2, 256)])
def test_default_configurations_match_and_repeat_bit_for_bit(heads: int, kv_heads: int, dim: int) -> None:
    check(
        DenseBench(CHECKED, dim, (heads, kv_heads)),
        default_forward(dim, HALF),
        default_backward(dim, HALF),
    )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("config", FORWARD, ids=str)
@pytest.mark.parametrize("dim", [128, 64])
def test_every_forward_candidate_matches(config: ForwardConfig, dim: int) -> None:
    check(DenseBench(CHECKED, dim, (4, 2)), config, default_backward(dim, HALF))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("for_keys", BACKWARD, ids=str)
@pytest.mark.parametrize("for_queries", BACKWARD, ids=str)
def test_every_backward_candidate_matches(for_keys: BackwardConfig, for_queries: BackwardConfig) -> None:
    check(DenseBench(CHECKED, 128, (4, 2)), default_forward(128, HALF), (for_keys, for_queries))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
def test_rows_of_equal_length_match(heads: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [
        torch.randn((2, 700, h, 128), device="cuda", dtype=HALF, generator=generator).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]
    upstream = torch.randn((2, 700, heads[0], 128), device="cuda", dtype=HALF, generator=generator)
    starts = torch.tensor([0, 700, 1400], dtype=torch.int32)
    q, k, v = (x.detach().float().flatten(0, 1).requires_grad_() for x in leaves)
    right, _ = door.reference(q, k, v, starts, starts, True, 128**-0.5)
    expected = [right, *torch.autograd.grad(right, (q, k, v), upstream.float().flatten(0, 1))]
    q, k, v = leaves
    out = door.flash_attention(q, k, v)
    for found, exact in zip((out, *torch.autograd.grad(out, leaves, upstream)), expected, strict=True):
        assert relative_error(found.detach().flatten(0, 1), exact.detach()) < 1e-2


INTEGERS = dict.fromkeys(
    ("query_stride", "query_head_stride", "key_stride", "key_head_stride", "value_stride", "value_head_stride",
     "out_stride", "out_head_stride", "grad_stride", "grad_head_stride", "grad_key_stride",
     "grad_key_head_stride", "grad_query_stride", "grad_query_head_stride", "lse_head_stride", "row_head_stride",
     "tokens"),
    "i32:16",
)  # fmt: skip
TYPES: dict[str, str] = {
    **dict.fromkeys(("query", "key", "value", "keys", "values", "out"), "*bf16"),
    **dict.fromkeys(("grad_out", "grad_key", "grad_value", "grad_query"), "*bf16"),
    **dict.fromkeys(("lse", "log_sums", "deltas"), "*fp32"),
    **dict.fromkeys(("query_starts", "key_starts", "documents"), "*i32"),
    **INTEGERS,
    "documents": "i32",
    "scale": "fp32",
}


def forward_case(config: ForwardConfig, dim: int) -> Case:
    source = f"tensordesc<bf16[{config.block_n}, {dim}]>" if config.descriptors else "*bf16"
    constants: dict[str, Any] = {
        "GROUP": 4, "DIM": dim, "COLUMNS": dim, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "CAUSAL": True, "SEARCH_STEPS": 4, "DESCRIPTORS": config.descriptors,
    }  # fmt: skip
    return Case(
        "cumulo.kernels.cuda.attention.flash_attention_forward:_forward",
        {**TYPES, "key_descriptor": source, "value_descriptor": source},
        constants,
        config.num_warps,
        config.num_stages,
        {} if config.maxnreg is None else {"maxnreg": config.maxnreg},
    )


def keys_case(config: BackwardConfig, dim: int) -> Case:
    wide = f"tensordesc<bf16[{config.walk}, {dim}]>" if config.descriptors else "*bf16"
    thin = f"tensordesc<fp32[1, {config.walk}]>" if config.descriptors else "*fp32"
    types = {
        "query_descriptor": wide,
        "grad_descriptor": wide,
        "log_sum_descriptor": thin,
        "delta_descriptor": thin,
    }
    constants: dict[str, Any] = {
        "GROUP": 4, "DIM": dim, "COLUMNS": dim, "BLOCK_M": config.walk, "BLOCK_N": config.own, "CAUSAL": True,
        "SEARCH_STEPS": 4, "DESCRIPTORS": config.descriptors, "STAGES": config.num_stages,
    }  # fmt: skip
    name = "cumulo.kernels.cuda.attention.flash_attention_backward:_keys_values"
    return Case(name, {**TYPES, **types}, constants, config.num_warps, config.num_stages)


def queries_case(config: BackwardConfig, dim: int) -> Case:
    constants: dict[str, Any] = {
        "GROUP": 4, "DIM": dim, "COLUMNS": dim, "BLOCK_M": config.own, "BLOCK_N": config.walk, "CAUSAL": True,
        "NUMBER_ROWS": 64, "SEARCH_STEPS": 4,
    }  # fmt: skip
    name = "cumulo.kernels.cuda.attention.flash_attention_backward:_queries"
    return Case(name, TYPES, constants, config.num_warps, config.num_stages)


@pytest.mark.long
@pytest.mark.long
def test_on_hopper_default_configurations_fit_and_use_its_matrix_units() -> None:
    for_keys, for_queries = default_backward(128, HALF)
    forward, keys, queries = compile_for_sm90(
        [
            forward_case(default_forward(128, HALF), 128),
            keys_case(for_keys, 128),
            queries_case(for_queries, 128),
        ]
    )
    for made in (forward, queries):
        made.check_fits()
    # The kernel that owns keys spills outside its inner loops only, where addresses are made.
    assert keys.registers <= 255 and keys.shared_bytes <= 227 << 10 and keys.count("UTMALDG")
    for made in (forward, keys, queries):
        assert made.count("HGMMA") and not made.count("HMMA")
