"""Kernels that start before the one ahead has ended read nothing that it may still write: in their machine code for
Hopper, only weights are asked for before the wait."""

from dataclasses import replace

import pytest
import torch

from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig
from cumulo.kernels.cuda.early import early
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.test_attention_on_gpu import decode_case

EARLY = {"EARLY": True}
PDL = {"launch_pdl": True}


def rotation() -> Case:
    pointers = dict.fromkeys(("qkv", "added", "cos", "sin", "q_norm", "k_norm", "keys", "values"), "*bf16")
    numbers = dict.fromkeys(("positions", "slots"), "*i32") | {"eps": "fp32"}
    strides = dict.fromkeys(("row_stride", "block_stride", "head_stride", "block_size"), "i32:16")
    constants = dict(HEADS=9, KV_HEADS=3, DIM=64, GROUP=1, NORM=False, INTERLEAVED=False, ADD=False)
    return Case(
        "cumulo.kernels.cuda.elementwise.rope_cache:_kernel", pointers | numbers | strides, constants | EARLY, 1,
        options=PDL,
    )  # fmt: skip


def norm_pair() -> Case:
    pointers = dict.fromkeys(("embed", "stream", "token_gains", "stream_gains", "out"), "*bf16")
    sizes = ("stride_embed", "stride_stream", "size")
    types = pointers | {"ids": "*i32", "eps": "fp32"} | dict.fromkeys(sizes, "i32:16")
    kernel = "cumulo.kernels.cuda.elementwise.rms_norm:_norm_pair"
    return Case(kernel, types, {"BLOCK": 1024} | EARLY, 4, options=PDL)


def likeliest() -> Case:
    pointers = dict.fromkeys(("x", "weight", "norm_weight"), "*bf16") | {"best": "*fp32", "place": "*i32"}
    sizes = ("OUTPUTS", "stride_x", "stride_weight", "stride_best")
    types = pointers | {"eps": "fp32"} | dict.fromkeys(sizes, "i32:16")
    constants = dict(M=1, K=576, BLOCK_M=8, ROWS=64, MAIN=512, REST=64)
    kernel = "cumulo.kernels.cuda.sampling.greedy_rounds:_tiles"
    return Case(kernel, types, constants | EARLY, 4, options=PDL)


@pytest.mark.long
def test_what_a_kernel_ahead_writes_is_read_behind_the_wait() -> None:
    decode = decode_case(DecodeConfig())
    decode = replace(decode, constants={**decode.constants, **EARLY}, options=PDL)
    # What a thread loads of the norms' gains and of the matrix.
    allowed = {"rotation": 0, "decode": 0, "pair": 2, "likeliest": 38}
    made = compile_for_sm90([rotation(), decode, norm_pair(), likeliest()])
    for (name, weights), compiled in zip(allowed.items(), made, strict=True):
        before, wait, behind = compiled.sass.partition("ACQBULK")
        assert wait, f"{name} does not wait"
        assert before.count("LDG") == weights and "STG" not in before, name
        assert behind.count("LDG") > 0 and behind.count("STG") > 0, name


def test_only_a_gpu_starts_kernels_early() -> None:
    assert early(True, torch.zeros(1)) == {"EARLY": 0}
