"""Kernels that start before the one ahead has ended read nothing that it may still write: in their machine code for
Hopper, only weights are asked for before the wait."""

from dataclasses import replace

import pytest
import torch

from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig
from cumulo.kernels.cuda.early import early
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.test_attention_on_gpu import decode_case
from tests.kernels.cuda.test_few_linear import POINTERS, STRIDES

EARLY = {"EARLY": True}
PDL = {"launch_pdl": True}


def rotation() -> Case:
    pointers = dict.fromkeys(("qkv", "added", "cos", "sin", "q_norm", "k_norm", "keys", "values"), "*bf16")
    numbers = dict.fromkeys(("positions", "slots"), "*i32") | dict.fromkeys(
        ("eps", "k_scale", "v_scale"), "fp32"
    )
    strides = dict.fromkeys(("row_stride", "block_stride", "head_stride", "block_size"), "i32:16")
    constants = dict(
        HEADS=9, KV_HEADS=3, DIM=64, GROUP=1, NORM=False, INTERLEAVED=False, SCALED=False, ADD=False
    )
    return Case(
        "cumulo.kernels.cuda.elementwise.rope_cache:_kernel", pointers | numbers | strides, constants | EARLY, 1,
        options=PDL,
    )  # fmt: skip


def paired() -> Case:
    pointers = dict.fromkeys(("embed", "stream", "weight", "out", "token_norm", "stream_norm"), "*bf16")
    sizes = ("OUTPUTS", "stride_embed", "stride_stream", "stride_weight", "stride_out")
    types = pointers | {"ids": "*i32", "eps": "fp32"} | dict.fromkeys(sizes, "i32:16")
    constants = dict(M=1, K=576, BLOCK_M=1, ROWS=2, BLOCK_K=1024, EACH=8)
    return Case("cumulo.kernels.cuda.linear.draft_linear:_paired", types, constants | EARLY, 4, options=PDL)


def likeliest() -> Case:
    pointers = dict.fromkeys(("x", "weight", "norm_weight"), "*bf16") | dict.fromkeys(
        ("best", "mass"), "*fp32"
    )
    sizes = ("OUTPUTS", "stride_x", "stride_weight", "stride_best")
    types = pointers | {"place": "*i32", "eps": "fp32"} | dict.fromkeys(sizes, "i32:16")
    constants = dict(M=1, K=576, BLOCK_M=1, ROWS=8, BLOCK_K=1024, EACH=8, MASS=True)
    return Case(
        "cumulo.kernels.cuda.linear.draft_linear:_likeliest", types, constants | EARLY, 4, options=PDL
    )


def test_what_a_kernel_ahead_writes_is_read_behind_the_wait() -> None:
    decode = decode_case(DecodeConfig())
    decode = replace(decode, constants={**decode.constants, **EARLY}, options=PDL)
    # A thread's loads of the matrix: two rows of 8 columns and 8 more, or eight rows.
    allowed = {"rotation": 0, "decode": 0, "paired": 4, "likeliest": 8}
    made = compile_for_sm90([rotation(), decode, paired(), likeliest()])
    for (name, weights), compiled in zip(allowed.items(), made, strict=True):
        before, wait, behind = compiled.sass.partition("ACQBULK")
        assert wait, f"{name} does not wait"
        assert before.count("LDG") == weights and "STG" not in before, name
        assert behind.count("LDG") > 0 and behind.count("STG") > 0, name


@pytest.mark.parametrize("order", [1, 2])
def test_the_next_kernel_may_start_before_the_wait_or_behind_it(order: int) -> None:
    constants = {"M": 1, "K": 576, "BLOCK_M": 1, "ROWS": 2, "BLOCK_K": 1024, "EACH": 8, "EARLY": order,
                 **dict.fromkeys(("NORM", "SWIGLU", "RESIDUAL", "BIAS", "PICK"), False)}  # fmt: skip
    types = POINTERS | STRIDES | {"eps": "fp32"}
    case = Case("cumulo.kernels.cuda.linear.few_linear:_few_linear_kernel", types, constants, 4, options=PDL)
    (made,) = compile_for_sm90([case])
    before, _, behind = made.sass.partition("ACQBULK")
    assert (before.count("PREEXIT"), behind.count("PREEXIT")) == ((1, 0) if order == 1 else (0, 1))
    assert before.count("LDG") == 2 and behind.count("LDG") > 0


def test_only_a_gpu_starts_kernels_early() -> None:
    assert early(True, torch.zeros(1)) == {"EARLY": 0}
