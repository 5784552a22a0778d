"""w4_dot against the packed matrix in float64, over shapes that do not fit its tiles, and its machine code for
Hopper."""

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.elementwise.rope_cache import reference as turned
from cumulo.kernels.cuda.linear import linear as door
from cumulo.kernels.cuda.linear import w4
from cumulo.kernels.cuda.linear import w4_dot as op
from cumulo.kernels.cuda.linear.linear import Choice
from cumulo.kernels.cuda.linear.product import PagedRotation
from cumulo.kernels.cuda.linear.w4_dot import W4DotConfig
from cumulo.kernels.cuda.linear.w4_weight import W4Weight
from tests.kernels.cuda.compile_sm90 import Case, compile_for_sm90
from tests.kernels.cuda.multiply import inputs, w4_dot
from tests.kernels.cuda.play_dots import Played, constants_of
from tests.kernels.cuda.tolerance import poisoned, relative_error

pytestmark = pytest.mark.long

KERNEL = "_w4_dot_kernel"
CONSTANTS = constants_of(op, KERNEL)


@pytest.fixture(autouse=True)
def _played_without_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(op, KERNEL, Played(op, KERNEL, ("_step",)))


def given(m: int, n: int, k: int, device: torch.device) -> dict[str, Tensor]:
    return inputs(m, n, k, device, torch.bfloat16)


def exactly(x: Tensor, weight: W4Weight, norm: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * norm.double()
    y = x @ weight.dequantised().double().t()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 7, 384, W4DotConfig(16, 1, 2)),
        (1, 100, 1280, W4DotConfig(32, 4, 2)),  # the last step has columns for two of four slices
        (3, 80, 512, W4DotConfig(16, 2, 8)),
        (8, 130, 256, W4DotConfig(64, 4, 4)),  # two of four slices have nothing at all
    ],
)
def test_the_product_is_exact_for_the_packed_matrix(
    m: int, n: int, k: int, config: W4DotConfig, device: torch.device
) -> None:
    numbers = given(m, n, k, device)
    weight = W4Weight.quantised(numbers["weight"])
    out = poisoned(m, n, dtype=torch.bfloat16, device=device)
    w4_dot(numbers["x"], weight, out, config=config)
    assert relative_error(out, exactly(numbers["x"], weight)) < 3e-3


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("swiglu", [False, True])
def test_norm_bias_swiglu_and_residual_are_part_of_it(m: int, swiglu: bool, device: torch.device) -> None:
    outputs = 41
    numbers = given(m, 2 * outputs if swiglu else outputs, 640, device)
    weight = W4Weight.quantised(numbers["weight"])
    stream = numbers["residual"][:, :outputs].contiguous()
    exact = exactly(numbers["x"], weight, numbers["norm"], numbers["bias"])
    if swiglu:
        gate, up = exact.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
    exact += stream.double()
    w4_dot(
        numbers["x"], weight, stream, norm_weight=numbers["norm"], eps=1e-5, residual=stream,
        bias=numbers["bias"], swiglu=swiglu, config=W4DotConfig(32, 2, 2),
    )  # fmt: skip
    assert relative_error(stream, exact) < 5e-3


def test_a_column_far_larger_than_the_others_drowns_no_codes(device: torch.device) -> None:
    """What is added to every code and taken away again is 136 times x, also where x is a thousand."""
    numbers = given(1, 48, 256, device)
    numbers["x"][:, 7] = 1000.0
    weight = W4Weight.quantised(numbers["weight"])
    out = w4_dot(numbers["x"], weight, config=W4DotConfig(16, 2, 1))
    assert relative_error(out, exactly(numbers["x"], weight)) < 3e-3


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rows"), [(3, 1, 32, 32), (2, 2, 64, 16)])
def test_queries_and_keys_are_rotated_and_keys_and_values_are_on_their_pages(
    heads: int, kv_heads: int, dim: int, rows: int, device: torch.device
) -> None:
    tokens, width, k = 3, (heads + 2 * kv_heads) * dim, 256
    numbers = given(tokens, width, k, device)
    weight = W4Weight.quantised(numbers["weight"])
    angles = torch.arange(64, device=device)[:, None] * torch.rand(dim // 2, device=device)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    positions = torch.tensor([7, 33, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([23, 40, -1], dtype=torch.int32, device=device)  # the last one only fills up
    keys, values = (
        torch.full((3, kv_heads, 16, dim), 9.0, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    qkv = poisoned(tokens, width, dtype=torch.bfloat16, device=device)
    rotation = PagedRotation(cos, sin, positions, slots, keys, values, heads)
    w4_dot(
        numbers["x"], weight, qkv, norm_weight=numbers["norm"], eps=1e-5, rotation=rotation,
        config=W4DotConfig(rows, 2, 1),
    )  # fmt: skip
    plain = exactly(numbers["x"], weight, numbers["norm"]).bfloat16()
    query, key, value = turned(plain, cos, sin, positions.long(), heads, kv_heads)
    real = slots[:2].long()

    def written(cache: Tensor) -> Tensor:
        return cache.transpose(1, 2).flatten(0, 1)[real]

    assert relative_error(qkv[:2, : heads * dim].reshape(2, heads, dim), query[:2]) < 1e-2
    assert relative_error(written(keys), key[:2]) < 1e-2
    assert relative_error(written(values), value[:2]) < 1e-2
    for cache in (keys, values):  # nothing else was written
        assert (cache != 9.0).sum() == 2 * kv_heads * dim


def test_what_it_cannot_take_is_refused(device: torch.device) -> None:
    for rows, columns, dtype in (
        (9, 128, torch.bfloat16),
        (2, 8192, torch.bfloat16),
        (2, 128, torch.float16),
    ):
        x = torch.zeros(rows, columns, dtype=dtype, device=device)
        with pytest.raises(ValueError, match="takes up to 8 rows"):
            w4_dot(x, W4Weight.quantised(torch.zeros(4, columns, device=device)))


def test_configurations_are_of_the_kernels_shapes() -> None:
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336), (1152, 896)):
        found = op.candidates(k)
        assert len(set(found)) == len(found)
        defaults = [op.default_config(m, n, k, *more) for m in (1, 4) for more in ((), (True,), (False, 128))]
        for config in [*found, *defaults]:
            assert config.rows % 16 == 0 and config.slices & (config.slices - 1) == 0 and config.ahead >= 1
    for dim in (32, 64, 96, 128):  # half a tile divides half a head
        for m in (1, 4):
            assert dim // 2 % (op.default_config(m, 6144, 4096, rotated_dim=dim).rows // 2) == 0


def test_the_door_asks_it_for_a_few_rows_and_another_kernel_where_it_does_not_apply(
    device: torch.device,
) -> None:
    weight = W4Weight.quantised(torch.randn(64, 256, device=device) / 16)
    kernels = [door.choose(m, weight).kernel for m in (1, 8, 9)]
    assert kernels == ["w4 dot", "w4 dot", "w4"]
    assert [door.choose(m, weight, swiglu=True).kernel for m in (1, 2)] == ["w4 dot", "w4"]
    long = [door._default(1, 4096, k, "w4").kernel for k in (14336, 16384, 28672)]
    assert long == ["w4 dot", "w4", "w4"]
    assert not door.rotates(9, weight, torch.bfloat16) and not door.rotates(1, weight, torch.float16)
    assert door.rotates(1, weight, torch.bfloat16) == weight.words.is_cuda  # without a GPU nothing plays that
    x = torch.randn(2, 256, device=device).half()
    assert relative_error(door.linear(x, weight), exactly(x, weight)) < 1e-3


def test_the_table_of_winners_says_how(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = W4Weight.quantised(torch.randn(64, 256, device=device) / 16)
    row = {
        "kernel": "w4 dot",
        "config": {"rows": 16, "slices": 2, "ahead": 1, "early": True, "waits_first": True},
    }
    monkeypatch.setattr(door, "WINNERS", {})
    door.use_winners({door.shape_key(1, 64, 256, "w4", False): row})
    assert door.choose(1, weight) == Choice("w4 dot", W4DotConfig(16, 2, 1, waits_first=True))
    assert door.winners()[door.shape_key(1, 64, 256, "w4", False)] == row


TYPES = (
    dict.fromkeys(("x", "out", "norm_weight", "residual", "bias", "cos", "sin", "keys", "values"), "*bf16")
    | dict.fromkeys(("positions", "slots"), "*i32")
    | {"M": "i32", "eps": "fp32", "words": "*i16", "scales": "*fp32"}
    | dict.fromkeys(
        ("OUTPUTS", "N", "stride_x", "stride_out", "stride_residual", "block_stride", "head_stride"), "i32:16"
    )
)


def case(k: int, rows: int, slices: int, ahead: int, **more: object) -> Case:
    constants = dict.fromkeys(CONSTANTS, 0) | {
        "K": k, "LINES": 1, "TILE": rows, "SLICES": slices, "AHEAD": ahead, "EARLY": 1,
        "num_warps": slices, **more,
    }  # fmt: skip
    return Case(f"{op.__name__}:{KERNEL}", TYPES, constants, slices, options={"launch_pdl": True})


@pytest.mark.long
def test_weights_go_from_memory_to_the_tensor_cores_and_are_asked_for_before_the_wait() -> None:
    cases = [
        case(4096, 16, 8, 4, NORM=1, SWIGLU=1),
        case(4096, 16, 8, 4, RESIDUAL=1),
        case(4096, 32, 8, 4, NORM=1, DIM=128, HEADS=32, KV_HEADS=8, PAGE=64),
        case(4096, 16, 8, 4, NORM=1, LINES=8),
    ]
    for made, asked in zip(compile_for_sm90(cases), cases, strict=True):
        tiles = asked.constants["TILE"] // 16
        # 4 steps of 128 columns: 8 products of 16 columns each, and as many that add x up, once for all tiles.
        assert made.count("HMMA") == 4 * 8 * (tiles + 1) and made.count("LDSM") == 0
        before, wait, _ = made.sass.partition("ACQBULK")
        assert wait and before.count("LDG.E.128") == 2 * 4 * tiles == made.loads(128)
        assert made.count("I2F") == 0 and "STG" not in before
        assert made.spilled_bytes <= 32 and made.registers <= 168


def test_more_than_eight_rows_are_normed_and_activated_by_kernels_of_their_own() -> None:
    """Every program of a product would do it again."""
    weight = W4Weight.quantised(torch.zeros(64, 256))
    assert [door.fuses(m, weight, swiglu) for m in (1, 8, 9) for swiglu in (False, True)] == [True] * 4 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("m", "n", "k", "splits"),
    [
        (1, 6144, 4096, 8),
        (16, 4096, 14336, 16),
        (64, 28672, 4096, 1),
        (64, 4096, 14336, 8),
        (128, 4096, 14336, 4),
    ],
)
def test_with_more_rows_a_product_is_split_less(m: int, n: int, k: int, splits: int) -> None:
    assert w4.default_config(m, n, k).splits == splits


def test_up_to_256_rows_of_wide_matrices_are_not_unpacked_in_memory() -> None:
    kernels = [door._default(m, n, 4096, "w4").kernel for n in (4096, 2048) for m in (128, 256, 257)]
    assert kernels == ["w4", "w4", "library", "w4", "library", "library"]
