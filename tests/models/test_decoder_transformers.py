"""The decoder against `transformers`, for a tiny random model of every family."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cumulo.models.decoder import Decoder
from cumulo.models.files.weights import fill_decoder
from cumulo.models.files.weights_safetensors import FolderWeights
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec
from tests import peers, thorough
from tests.models import tiny
from tests.models.stepper import Stepper

PROMPT = tiny.prompt(75, seed=1)
SHARDED = ("qwen3", "deepseek_v3")


@functools.cache
def oracle(name: str, folder: Path) -> tuple[peers.transformers.PreTrainedModel, ModelSpec]:
    model = tiny.save(name, folder, max_shard_size="60KB" if name in SHARDED else "1GB")
    return model, spec_from_config(json.loads((folder / "config.json").read_text()))


def changed(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """`spec` with fields replaced; `moe={...}` replaces inside the part of that name."""
    parts = {
        key: dataclasses.replace(getattr(spec, key), **value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    return dataclasses.replace(spec, **parts)


@functools.cache
def prompt_logits(model: peers.transformers.PreTrainedModel) -> torch.Tensor:
    return tiny.reference_logits(model, PROMPT)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("tiny")

    def make(name: str, dtype: torch.dtype = torch.float32, **change: Any) -> Any:
        model, own = oracle(name, root / name)
        decoder = Decoder(changed(own, **change), dtype)
        fill_decoder(decoder, FolderWeights(root / name, own))
        return model, decoder

    return make


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_logits_agree_with_transformers_at_every_position(name: str, load: Any) -> None:
    model, decoder = load(name)
    expected = prompt_logits(model)
    actual = Stepper(decoder).feed(PROMPT, chunk=17)
    assert expected.std() > 0.5  # not a model that says nothing
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name: str, load: Any) -> None:
    model, decoder = load(name)
    count = 64 if thorough.chosen else 20
    expected = tiny.reference_greedy(model, PROMPT[:30], count)
    assert len(set(expected)) > 5  # a constant or cycling answer would prove little
    assert Stepper(decoder).greedy(PROMPT[:30], count, chunk=11) == expected


def test_sharded_folders_are_among_the_proven_ones(load: Any, tmp_path: Path) -> None:
    tiny.save(SHARDED[0], tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_theta": 20000.0}),
        ("llama", {"rope_interleaved": True}),
        ("llama", {"norm_eps": 1e-2}),
        ("llama3_rope", {"rope_scaling": None}),
        ("llama3_rope", {"rope_scaling": {"low_freq_factor": 0.5}}),
        ("llama_linear_rope", {"rope_scaling": None}),
        ("mistral", {"sliding_window": 14}),
        ("mistral", {"sliding_window": None}),
        ("qwen2_windowed", {"windowed_layers": None}),
        ("qwen2_yarn", {"rope_scaling": {"attention_factor": 1.0}}),
        ("qwen3_moe", {"moe": {"normalise_weights": False}}),
        ("qwen3_moe_sparse", {"moe": {"normalise_weights": True}}),
        ("mixtral", {"moe": {"experts_per_token": 3}}),
        ("deepseek_v2", {"moe": {"routed_scale": 1.0}}),
        ("deepseek_v2_lite", {"moe": {"groups": 1, "top_groups": 1}}),
        ("deepseek_v2_lite", {"moe": {"group_score": "top2sum"}}),
        ("deepseek_v2_lite", {"rope_scaling": {"mscale_all_dim": 0.0}}),
        ("deepseek_v3", {"moe": {"groups": 1, "top_groups": 1}}),
        ("deepseek_v3", {"moe": {"group_score": "max"}}),
        ("deepseek_v3", {"moe": {"scoring": "softmax"}}),
        ("deepseek_v3", {"rope_scaling": {"mscale": 0.7}}),
        ("deepseek_v3", {"rope_interleaved": False}),
        ("ernie4_5", {"rope_interleaved": False}),
        ("ministral", {"windowed_layers": None}),
        ("cwm", {"windowed_layers": (0, 1)}),
        ("phi3", {"sliding_window": None}),
        ("dots1", {"moe": {"scoring": "softmax"}}),
        ("dots1", {"windowed_layers": None}),
        ("glm4_moe_lite", {"moe": {"normalise_weights": False}}),
        ("youtu", {"rope_interleaved": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_tiny_models_notice_a_wrong_spec(name: str, change: dict[str, Any], load: Any) -> None:
    """The proof above can fail: each detail of a family moves the logits well beyond its tolerance."""
    model, wrong = load(name, **change)
    assert (Stepper(wrong).feed(PROMPT, chunk=17) - prompt_logits(model)).abs().max() > 2e-3


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v2"])
def test_bfloat16_stays_close_to_float32(name: str, load: Any) -> None:
    _, exact = load(name)
    _, rough = load(name, torch.bfloat16)
    expected = Stepper(exact).feed(PROMPT, chunk=40)
    actual = Stepper(rough).feed(PROMPT, chunk=40)
    assert actual.dtype == torch.bfloat16
    similarity = torch.cosine_similarity(actual.float(), expected, dim=-1)
    assert similarity.median() > 0.99


@pytest.mark.long
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_in_float64_chunks_and_company_change_nothing(name: str, load: Any) -> None:
    _, decoder = load(name, torch.float64)
    whole = Stepper(decoder).feed(PROMPT, chunk=len(PROMPT))
    for chunk in (7, 32):
        alone = Stepper(decoder, block_size=5, seed=chunk).feed(PROMPT, chunk)
        torch.testing.assert_close(alone, whole, atol=1e-10, rtol=0)

    stepper = Stepper(decoder, seed=9)
    others = {"a": tiny.prompt(40, seed=2), "b": tiny.prompt(21, seed=3)}
    parts = [
        stepper.step({"a": others["a"][:30], "only": PROMPT[:50]}),
        stepper.step({"only": PROMPT[50:51], "a": others["a"][30:31], "b": others["b"]}),
        stepper.step({"a": others["a"][31:], "only": PROMPT[51:]}),
    ]
    mixed = torch.cat([part["only"] for part in parts])
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed, whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["llama3_rope", "qwen3", "deepseek_v3"])
def test_float64_is_the_same_function_as_float32(name: str, load: Any) -> None:
    _, single = load(name)
    _, double = load(name, torch.float64)
    expected = Stepper(single).feed(PROMPT, chunk=25).double()
    torch.testing.assert_close(Stepper(double).feed(PROMPT, chunk=25), expected, atol=2e-4, rtol=0)
