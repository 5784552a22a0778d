"""The decoder's parts on their own: names and shapes, rotation, routing, packed weights."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.models.decoder import Decoder
from cumulo.models.files.names_huggingface import placements
from cumulo.models.files.placement import Placement, placed_parts
from cumulo.models.files.weights import fill_decoder
from cumulo.models.files.weights_safetensors import FolderWeights
from cumulo.models.linear import TensorKind
from cumulo.models.moe import MixtureOfExperts
from cumulo.models.rope import RotaryTable, inverse_frequencies
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec, MoESpec, RopeScaling
from tests import thorough
from tests.models import tiny
from tests.models.stepper import Stepper

SMALL = ModelSpec("llama", 50, 16, 1, 2, 1, 8, 24, 64)


def tiny_spec(name: str) -> ModelSpec:
    return spec_from_config(tiny.build(name).config.to_dict())


@pytest.mark.long
def test_a_decoder_on_the_meta_device_has_every_parameter_and_no_memory() -> None:
    for name in tiny.FAMILIES:
        spec = tiny_spec(name)
        decoder = Decoder(spec, torch.bfloat16, "meta")
        parameters = dict(decoder.named_parameters())
        assert {key: tuple(value.shape) for key, value in parameters.items()} == parameter_shapes(spec)
        assert all(value.is_meta for value in parameters.values())


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_placements_fill_every_element_exactly_once(name: str) -> None:
    spec = tiny_spec(name)
    counts = {target: torch.zeros(shape) for target, shape in parameter_shapes(spec).items()}
    for placement in placements(spec):
        placement.region(counts[placement.target]).add_(1)
    assert all((count == 1).all() for count in counts.values())


def test_a_placement_can_transpose_and_see_its_target_in_another_shape() -> None:
    parameter = torch.zeros(6, 4)  # two heads of one key row and two value rows
    keys = torch.arange(8.0).view(2, 4, 1)
    placement = Placement("k", "kv_b", (2, 4, 1), (0, 0, 0), view=(2, 3, 4), transposed=True)
    placed_parts([placement], None)[0].fill(parameter, keys)
    assert parameter[0].tolist() == [0, 1, 2, 3] and parameter[3].tolist() == [4, 5, 6, 7]
    assert parameter.count_nonzero() == 7


# -- rotation ------------------------------------------------------------------------------------------
@given(
    heads=st.integers(1, 3), half=st.integers(1, 8), distance=st.integers(0, 30), interleaved=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.bfloat16]),
)  # fmt: skip
@settings(max_examples=thorough.examples(30), deadline=None)
def test_a_rotated_product_depends_only_on_the_distance(
    heads: int, half: int, distance: int, interleaved: bool, dtype: torch.dtype
) -> None:
    spec = dataclasses.replace(SMALL, head_dim=2 * half, rope_interleaved=interleaved, rope_theta=100.0)
    table = RotaryTable(spec, dtype)
    query, key = torch.randn(
        2, 1, heads, 2 * half, dtype=dtype, generator=torch.Generator().manual_seed(half)
    )

    def product(position: int) -> torch.Tensor:
        there = table.rotation_at(torch.tensor([position + distance])).apply(query)
        return (there * table.rotation_at(torch.tensor([position])).apply(key)).sum(-1)

    tolerance = 1e-4 if dtype == torch.float64 else 0.3
    torch.testing.assert_close(product(0), product(33), atol=tolerance, rtol=0)
    torch.testing.assert_close(table.rotation_at(torch.tensor([0])).apply(query), query)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_interleaved_pairs_are_the_two_halves_in_another_order(dtype: torch.dtype) -> None:
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.tensor([0, 1, 7, 30, 63])
    order = torch.arange(8).view(2, 4).T.flatten()  # halves -> pairs
    halves = RotaryTable(SMALL, dtype).rotation_at(positions).apply(x)
    pairs = RotaryTable(dataclasses.replace(SMALL, rope_interleaved=True), dtype).rotation_at(positions)
    torch.testing.assert_close(pairs.apply(x[..., order]), halves[..., order], atol=2e-3, rtol=0)


def test_gguf_rope_factors_are_llama3_scaling() -> None:
    """Converters write llama3 scaling as one divisor per frequency; both forms must be one function."""
    scaling = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    spec = dataclasses.replace(SMALL, head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    factors = []
    for i in range(64):
        wavelength = 2 * math.pi * 500000.0 ** (2 * i / 128)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    other = dataclasses.replace(spec, rope_scaling=RopeScaling("factors", 1.0, 8192, factors=tuple(factors)))
    torch.testing.assert_close(inverse_frequencies(other), inverse_frequencies(spec), rtol=1e-5, atol=0)
    assert len(set(factors)) > 3


# -- routing -------------------------------------------------------------------------------------------
@given(
    tokens=st.integers(1, 20), experts=st.sampled_from([4, 8]), per_token=st.integers(1, 4),
    seed=st.integers(0, 1000), shared=st.booleans(),
)  # fmt: skip
@settings(max_examples=thorough.examples(30), deadline=None)
def test_experts_give_what_computing_all_of_them_for_all_tokens_gives(
    tokens: int, experts: int, per_token: int, seed: int, shared: bool
) -> None:
    moe = MoESpec(experts, per_token, 12, shared_hidden=8 if shared else 0)
    layer = MixtureOfExperts(SMALL, moe, kind=TensorKind(torch.float64, "cpu"))
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    x = torch.randn(tokens, SMALL.hidden, dtype=torch.float64, generator=generator)

    probabilities = F.linear(x, layer.router.weight).softmax(-1)
    best = probabilities >= probabilities.sort(-1, descending=True).values[:, per_token - 1 : per_token]
    weights = probabilities * best
    weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,efh->tef", x, layer.experts.gate_up).chunk(2, -1)
    each = torch.einsum("tef,ehf->teh", F.silu(gate) * up, layer.experts.down)
    expected = (each * weights[..., None]).sum(1)
    if layer.shared is not None:
        expected = expected + layer.shared(x)
    torch.testing.assert_close(layer(x), expected)


# -- packed weights ------------------------------------------------------------------------------------
class HalfPrecision:
    """A packed weight of the simplest kind: stored in bfloat16, computed in the dtype of the input."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.stored = weight.to(torch.bfloat16)
        self.shape = tuple(weight.shape)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.stored.to(x.dtype).T

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return self.stored[indices].float()


@pytest.mark.parametrize("name", ["llama_biased", "qwen2", "mixtral", "deepseek_v3"])
def test_packed_weights_compute_what_their_plain_values_compute(name: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    rounded, packed = Decoder(spec, torch.float64), Decoder(spec, torch.float64)
    for decoder in (rounded, packed):
        fill_decoder(decoder, FolderWeights(tmp_path, spec))
    replaced = 0
    for key, parameter in list(packed.named_parameters()):
        if not packed.can_pack(key):
            continue
        plain = dict(rounded.named_parameters())[key]
        plain.copy_(plain.to(torch.bfloat16))
        if parameter.ndim == 3:
            packed.pack(key, [HalfPrecision(expert) for expert in parameter])
        else:
            packed.pack(key, HalfPrecision(parameter))
        replaced += 1
    left = [key for key, parameter in packed.named_parameters() if parameter.ndim > 1]
    assert replaced >= 4 * spec.layers and all("router" in key or "kv_b" in key for key in left)
    prompt = tiny.prompt(20)
    torch.testing.assert_close(
        Stepper(packed).feed(prompt, 7), Stepper(rounded).feed(prompt, 20), atol=1e-9, rtol=0
    )


def test_a_packed_weight_of_another_shape_or_place_is_refused() -> None:
    decoder = Decoder(tiny_spec("deepseek_v2"), device="meta")
    weight = HalfPrecision(torch.zeros(3, 3))
    for name in (
        "embed.weight",
        "layers.0.attention.kv_b.weight",
        "layers.1.ffn.experts.down",
        "final_norm.weight",
    ):
        with pytest.raises(ValueError, match=r"3, 3|plain|per expert"):
            decoder.pack(name, weight)
    with pytest.raises(ValueError, match="3, 3"):
        decoder.pack("layers.1.ffn.experts.down", [weight] * 8)
