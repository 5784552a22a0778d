"""linear: whichever kernel does the work, the answer is the same; the table of winners survives JSON."""

import json

import pytest
import torch
from torch import Tensor

from cumulo.kernels.cuda.linear import linear as door
from cumulo.kernels.cuda.linear.fp8 import Fp8Weight
from cumulo.kernels.cuda.linear.linear import Choice, Weight, choose, linear
from cumulo.kernels.cuda.linear.product import reference
from cumulo.kernels.cuda.linear.skinny_linear import SkinnyConfig, default_config
from cumulo.kernels.cuda.linear.small_linear import SmallConfig
from cumulo.kernels.cuda.linear.w4 import W4Config
from cumulo.kernels.cuda.linear.w4_weight import W4Weight
from tests.kernels.cuda.multiply import inputs
from tests.kernels.cuda.tolerance import poisoned, relative_error
from tests.thorough import rare

N, K = 32, 128


@pytest.fixture
def given(device: torch.device) -> dict[str, Tensor]:
    return inputs(6, N, K, device)


def weights(plain: Tensor) -> dict[str, Weight]:
    return {"plain": plain, "fp8": Fp8Weight.quantised(plain), "w4": W4Weight.quantised(plain)}


def dense(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantised()


CHOICES = {
    "plain": [Choice("skinny", SkinnyConfig(16, 64, 1, 4, 2)), Choice("library")],
    "fp8": [Choice("skinny", SkinnyConfig(16, 64, 1, 4, 2)), Choice("library")],
    "w4": [Choice("w4", W4Config(32, 1, 4, 2)), Choice("library")],
}


@pytest.mark.parametrize(("kind", "which"), [(kind, which) for kind in CHOICES for which in (0, 1)])
@pytest.mark.parametrize("swiglu", [True, *rare(False)])
def test_every_kernel_behind_the_door_computes_the_same(
    kind: str, which: int, swiglu: bool, given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = given["x"], weights(given["weight"])[kind]
    if x.is_cuda and kind == "fp8" and which == 1:
        pytest.skip("the library multiplies 8-bit rows into bfloat16 only")
    key = door.shape_key(len(x), N, K, door.kind_of(weight), swiglu)
    monkeypatch.setitem(door.WINNERS, key, CHOICES[kind][which])
    outputs = N // 2 if swiglu else N
    residual, bias, norm = given["residual"][:, :outputs].contiguous(), given["bias"], given["norm"]
    exact = reference(
        x.double(), dense(weight).double(), norm.double(), 1e-6, residual.double(), swiglu, bias.double()
    )
    allowed = 0.06 if kind == "fp8" and which == 1 else 2e-3  # there activations are rounded to 8 bits, too
    found = linear(x, weight, norm_weight=norm, residual=residual, swiglu=swiglu, bias=bias)
    assert relative_error(found, exact) < allowed
    stream = residual.clone()
    assert linear(x, weight, stream, norm_weight=norm, residual=stream, swiglu=swiglu, bias=bias) is stream
    assert relative_error(stream, exact) < allowed
    out = poisoned(len(x), outputs, dtype=x.dtype, device=x.device)
    linear(x, weight, out, swiglu=swiglu)
    assert relative_error(out, reference(x.double(), dense(weight).double(), swiglu=swiglu)) < allowed


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_one_row_takes_the_streaming_kernel_and_agrees(
    kind: str, given: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = given["x"][:1], weights(given["weight"])[kind]
    small = Choice("small", SmallConfig(8, 64, 2))
    monkeypatch.setitem(door.WINNERS, door.shape_key(1, N, K, door.kind_of(weight), True), small)
    found = linear(x, weight, norm_weight=given["norm"], swiglu=True)
    exact = reference(x.double(), dense(weight).double(), given["norm"].double(), swiglu=True)
    assert relative_error(found, exact) < 2e-3


@pytest.mark.parametrize("kind", ["plain", "fp8", "w4"])
def test_in_the_invariant_mode_a_row_has_the_same_bits_alone(kind: str, given: dict[str, Tensor]) -> None:
    x, weight = given["x"], weights(given["weight"])[kind]
    together = linear(x, weight, norm_weight=given["norm"], swiglu=True, invariant=True)
    alone = linear(x[2:3], weight, norm_weight=given["norm"], swiglu=True, invariant=True)
    assert torch.equal(alone[0], together[2])
    exact = reference(x.double(), dense(weight).double(), given["norm"].double(), swiglu=True)
    assert relative_error(together, exact) < 2e-3


def test_without_a_table_one_row_streams_and_many_rows_go_to_the_library() -> None:
    weight = torch.empty(N, K, dtype=torch.bfloat16)
    assert choose(1, weight).kernel == "small"
    assert choose(1, torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")) == Choice("small")
    assert choose(16, weight, swiglu=True).kernel == "skinny"
    assert choose(512, weight).kernel == "library"


def test_without_a_table_no_rule_leaves_a_few_programs_for_the_end() -> None:
    """A program for 64 outputs: 128 of them fill an H200's 132 multiprocessors once, 224 almost twice; 140 leave 8
    for a second turn and 192 fewer than half; 272 leave 8 for a third, or for a second where there is room for two
    at once; 2004 leave 24 for a sixteenth."""

    def chosen(rows: int, outputs: int, swiglu: bool) -> str:
        inputs = 3072
        weight = torch.empty(outputs * (2 if swiglu else 1), inputs, dtype=torch.bfloat16, device="meta")
        kernel = choose(rows, weight, swiglu).kernel
        if kernel != "skinny":
            return kernel
        return f"skinny {default_config(rows, *weight.shape, swiglu).block_k}"

    for swiglu in (False, True):
        for tiles in (128, 224, 2004):
            assert [chosen(m, tiles * 64, swiglu) for m in (8, 16)] == ["skinny 256"] * 2
        assert [chosen(m, 272 * 64, swiglu) for m in (8, 16)] == ["library"] * 2
    for tiles in (140, 192):
        assert [chosen(m, tiles * 64, True) for m in (8, 16)] == ["skinny 128", "library"]
        assert [chosen(m, tiles * 64, False) for m in (8, 16)] == ["library"] * 2


@pytest.mark.parametrize(
    ("n", "k", "swiglu", "kinds"),
    [
        (576, 576, False, "bf16 fp8"),
        (2048, 4096, False, "bf16 fp8"),
        (2048, 8192, False, "bf16 fp8"),
        (4096, 4096, False, "fp8"),
        (6144, 4096, False, ""),
        (4096, 14336, False, ""),
        (9728, 896, True, "bf16 fp8"),
        (17920, 1536, True, ""),
        (28672, 4096, True, ""),
    ],
)
def test_without_a_table_one_row_of_few_bytes_starts_early(n: int, k: int, swiglu: bool, kinds: str) -> None:
    """Up to 16 MiB whatever the weights, and twice as much where rows are long, or gate and up's are short."""

    def early(kind: str) -> bool:
        choice = door._default(1, n, k, kind, swiglu)
        return isinstance(choice.config, SmallConfig) and choice.config.early

    assert [kind for kind in ("bf16", "fp8") if early(kind)] == kinds.split()


def test_where_the_library_won_with_swiglu_it_makes_the_product_alone_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decoder asks for gate and up without SwiGLU then: it must not fall back to a kernel for few rows."""
    weight = torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta")
    key = door.shape_key(4, *weight.shape, "bf16", True)
    for choice in (door.Choice("library"), door.Choice("skinny")):
        monkeypatch.setattr(door, "WINNERS", {key: choice})
        assert door.choose(4, weight, swiglu=True) == choice
        assert door.choose(4, weight).kernel == ("library" if choice.kernel == "library" else "skinny")
        assert door.choose(1, weight).kernel == "small"


def test_the_table_of_winners_survives_json(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "bf16 m1 n8 k16": Choice("small", SmallConfig(2, 512, 4)),
        "bf16 m64 n8 k16 swiglu": Choice("skinny", SkinnyConfig(64, 128, 4, 4, 5)),
        "w4 m16 n8 k16": Choice("w4", W4Config(64, 2, 4, 6)),
        "fp8 m128 n8 k16": Choice("library"),
    }
    monkeypatch.setattr(door, "WINNERS", dict(table))
    written = json.dumps(door.winners())
    door.WINNERS.clear()
    door.use_winners(json.loads(written))
    assert table == door.WINNERS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the library's 8-bit product")
@pytest.mark.parametrize("m", [1, 3, 16, 40, 64, 200])
@pytest.mark.parametrize("kind", ["plain", "fp8", "w4"])
def test_real_shapes_in_bfloat16_agree_with_float64(m: int, kind: str) -> None:
    generator = torch.Generator("cuda").manual_seed(m)

    def draw(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * std).bfloat16()

    x, norm = draw(m, 1024), 1 + draw(1024, std=0.25)
    plain = draw(6144, 1024, std=1 / 32)
    weight: Weight = plain
    if kind == "fp8":
        weight = Fp8Weight.quantised(plain)
    elif kind == "w4":
        weight = W4Weight.quantised(plain)
    residual = draw(m, 3072)
    stream = residual.clone()
    linear(x, weight, stream, norm_weight=norm, residual=stream, swiglu=True)
    exact = reference(x.double(), dense(weight).double(), norm.double(), 1e-6, residual.double(), True)
    assert relative_error(stream, exact) < (0.05 if kind == "fp8" and m > 64 else 0.01)
