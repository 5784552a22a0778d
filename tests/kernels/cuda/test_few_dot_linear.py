"""few_dot against plain torch, over shapes that do not fit its tiles, and its machine code for Hopper."""

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.elementwise.rope_cache import reference as turned
from cumulo.kernels.cuda.linear import few_dot as op
from cumulo.kernels.cuda.linear import linear as door
from cumulo.kernels.cuda.linear.few_dot import DotConfig
from cumulo.kernels.cuda.linear.product import PagedRotation, reference
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.multiply import few_dot, inputs
from tests.kernels.cuda.play_dots import Played, constants_of
from tests.kernels.cuda.tolerance import check_close, poisoned, relative_error
from tests.thorough import rare

pytestmark = pytest.mark.long

CONSTANTS = constants_of(op, "_few_dot_kernel")


@pytest.fixture(autouse=True)
def _played_without_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(op, "_few_dot_kernel", Played(op, "_few_dot_kernel", ("_columns",)))


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 7, 104, DotConfig(16, 1, 1)),
        (3, 40, 320, DotConfig(16, 4, 4)),
        (4, 64, 576, DotConfig(32, 2, 4)),
        (8, 33, 1536, DotConfig(16, 8, 8)),
        *rare((5, 80, 256, DotConfig(32, 4, 4)), (2, 100, 576, DotConfig(32, 1, 2))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_product_is_as_exact_as_torch_for_any_shape(
    m: int, n: int, k: int, config: DotConfig, dtype: torch.dtype, device: torch.device
) -> None:
    given = inputs(m, n, k, device, dtype)
    out = poisoned(m, n, dtype=dtype, device=device)
    few_dot(given["x"], given["weight"], out, config=config)
    check_close(out, reference, given["x"], given["weight"])


@pytest.mark.parametrize(("m", "k"), [(2, 304), (8, 576), *rare((5, 256), (1, 576))])
@pytest.mark.parametrize(("swiglu", "rows", "slices"), [(False, 16, 2), (True, 16, 4), (True, 32, 2)])
def test_norm_bias_swiglu_and_residual_are_part_of_it(
    m: int, k: int, swiglu: bool, rows: int, slices: int, device: torch.device
) -> None:
    outputs = 21
    given = inputs(m, 2 * outputs if swiglu else outputs, k, device)
    stream = given["residual"][:, :outputs].contiguous()
    added = stream.clone()
    few_dot(
        given["x"], given["weight"], stream, norm_weight=given["norm"], eps=1e-5, residual=stream, swiglu=swiglu,
        bias=given["bias"], config=DotConfig(rows, slices, slices),
    )  # fmt: skip

    def exact(x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        return reference(x, weight, norm, 1e-5, residual, swiglu, bias)

    check_close(stream, exact, given["x"], given["weight"], given["norm"], added, given["bias"])


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rows"), [(3, 1, 32, 16), (2, 2, 64, 32)])
def test_queries_and_keys_are_rotated_and_keys_and_values_are_on_their_pages(
    heads: int, kv_heads: int, dim: int, rows: int, device: torch.device
) -> None:
    tokens, width, k = 5, (heads + 2 * kv_heads) * dim, 200
    given = inputs(tokens, width, k, device)
    angles = torch.arange(64, device=device)[:, None] * torch.rand(dim // 2, device=device)
    cos, sin = angles.cos().half(), angles.sin().half()
    positions = torch.tensor([7, 8, 9, 33, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([23, 16, 17, 40, -1], dtype=torch.int32, device=device)  # the last one only fills up
    keys, values = (
        torch.full((3, kv_heads, 16, dim), 9.0, dtype=torch.float16, device=device) for _ in range(2)
    )
    qkv = poisoned(tokens, width, dtype=torch.float16, device=device)
    few_dot(
        given["x"], given["weight"], qkv, norm_weight=given["norm"], bias=given["bias"],
        rotation=PagedRotation(cos, sin, positions, slots, keys, values, heads), config=DotConfig(rows, 2, 2),
    )  # fmt: skip
    plain = reference(given["x"], given["weight"], given["norm"], 1e-6, None, False, given["bias"])
    query, key, value = turned(plain, cos, sin, positions.long(), heads, kv_heads)
    real = slots[:4].long()

    def written(cache: Tensor) -> Tensor:
        return cache.transpose(1, 2).flatten(0, 1)[real]

    assert relative_error(qkv[:4, : heads * dim].reshape(4, heads, dim), query[:4]) < 2e-3
    assert relative_error(written(keys), key[:4]) < 2e-3
    assert relative_error(written(values), value[:4]) < 2e-3
    for cache in (keys, values):  # nothing else was written
        assert (cache != 9.0).sum() == 4 * kv_heads * dim


def test_what_it_cannot_take_is_refused(device: torch.device) -> None:
    for rows, columns in ((9, 64), (2, 60)):
        given = inputs(rows, 4, columns, device)
        with pytest.raises(ValueError, match="takes up to 8 rows"):
            few_dot(given["x"], given["weight"])


def test_heads_that_no_tile_ends_with_are_not_rotated(device: torch.device) -> None:
    """A program would take rows of two heads, and pair them wrongly."""
    given = inputs(2, 240, 64, device)
    words = torch.zeros(2, dtype=torch.int32, device=device)
    tables = torch.zeros(1, 40, dtype=torch.float16, device=device)
    cache = torch.zeros(1, 1, 16, 80, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="use rope_cache"):
        few_dot(
            given["x"],
            given["weight"],
            rotation=PagedRotation(tables, tables, words, words, cache, cache, 1),
        )


def test_candidates_keep_their_weights_in_registers() -> None:
    for n, k, paired in ((960, 576, True), (3072, 576, True), (576, 1536, False), (1024, 3072, False)):
        found = op.candidates(4, n, k, paired)
        assert op.default_config(4, n, k, paired) in found
        for config in found:
            assert (
                config.num_warps % config.slices == 0 and 16 * config.num_warps <= config.rows * config.slices
            )


POINTERS = dict.fromkeys(
    ("x", "weight", "out", "norm_weight", "residual", "bias", "cos", "sin", "keys", "values"), "*bf16"
) | dict.fromkeys(("positions", "slots"), "*i32")
SIZES = (
    "OUTPUTS",
    "stride_x",
    "stride_weight",
    "stride_out",
    "stride_residual",
    "block_stride",
    "head_stride",
)
TYPES = POINTERS | dict.fromkeys(SIZES, "i32:16") | {"M": "i32", "eps": "fp32"}


def case(k: int, slices: int, **more: object) -> Case:
    constants = dict.fromkeys(CONSTANTS, 0) | {
        "K": k,
        "TILE": 16,
        "SLICES": slices,
        "EARLY": 1,
        **more,
    }
    constants["num_warps"] = slices
    kernel = "cumulo.kernels.cuda.linear.few_dot:_few_dot_kernel"
    return Case(kernel, TYPES, constants, slices, options={"launch_pdl": True})


@pytest.mark.long
def test_weights_go_from_memory_to_the_tensor_cores_and_are_asked_for_before_the_wait() -> None:
    cases = [
        case(576, 4, NORM=1, SWIGLU=1),
        case(1536, 8, RESIDUAL=1),
        case(576, 4, NORM=1, DIM=64, HEADS=9, KV_HEADS=3, PAGE=64),
    ]
    for given, made in zip(cases, compile_for_sm90(cases), strict=True):
        made.check_fits()
        steps = -(-given.constants["K"] // (32 * given.num_warps))
        normed, turns = given.constants["NORM"], given.constants["DIM"] > 0
        assert made.count("HMMA") == 2 * steps and made.count("BAR") == 1 and made.count("LDSM") == 0
        before, wait, behind = made.sass.partition("ACQBULK")
        # Two rows of 16 bytes for each thread and step, and the norm's gains; x behind the wait, and little else.
        assert wait and before.count("LDG.E.128") == before.count("LDG") == (3 if normed else 2) * steps
        assert behind.count("LDG.E.128") == steps and behind.count("LDG") <= steps + (8 if turns else 1)
        assert "STG" not in before and made.registers <= 128


def test_without_a_table_several_rows_of_small_matrices_take_it() -> None:
    def kernel(m: int, n: int, k: int, kind: str = "bf16") -> str:
        return door._default(m, n, k, kind).kernel

    assert all(
        kernel(m, n, k) == "dot" for m in (2, 5, 8) for n, k in ((576, 1536), (6144, 1024), (1024, 8192))
    )
    others = ((1, 576, 1536), (9, 576, 1536), (4, 14336, 4096), (4, 576, 1532), (4, 128, 16384))
    assert "dot" not in {kernel(*shape) for shape in others} | {
        kernel(4, 576, 576, "fp8"),
        kernel(4, 576, 576, "float32"),
    }


@pytest.mark.long
def test_the_table_of_winners_says_how(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(4, 64, 320, device, torch.bfloat16 if device.type == "cuda" else torch.float16)
    weight, kind = given["weight"], door.kind_of(given["weight"])
    key = door.shape_key(4, 64, 320, kind, False)
    assert door.choose(4, weight).config == op.default_config(4, 64, 320)
    assert door.rotates(4, weight, weight.dtype) == weight.is_cuda  # without a GPU nothing plays that
    config = {"rows": 16, "slices": 2, "num_warps": 2, "early": True, "waits_first": False}
    monkeypatch.setattr(door, "WINNERS", {})
    door.use_winners(
        {key: {"kernel": "dot", "config": config}, f"{key} rotated": {"kernel": "dot", "config": config}}
    )
    assert door.choose(4, weight) == door.Choice("dot", DotConfig(16, 2, 2)) and door.rotates(
        3, weight, weight.dtype
    )
    assert door.winners()[key]["config"] == config
    out = door.linear(given["x"], weight, norm_weight=given["norm"], residual=given["residual"])

    def exact(x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor) -> Tensor:
        return reference(x, weight, norm, 1e-6, residual)

    check_close(out, exact, given["x"], weight, given["norm"], given["residual"])
