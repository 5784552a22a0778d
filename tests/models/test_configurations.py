"""No field of a config.json is overlooked: what changes the numbers of `transformers` changes our spec or is
refused, and an architecture that we do not know is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cumulo.errors import ModelError
from cumulo.models.decoder import Decoder
from cumulo.models.files.weights import fill_decoder
from cumulo.models.files.weights_safetensors import FolderWeights
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec
from tests import peers, thorough
from tests.models import tiny
from tests.models.stepper import Stepper

PROMPT = tiny.prompt(40, seed=1)
COMMON = ("llama", "phi3", "deepseek_v3")
# What is about files, tokens or training, or is checked by the tensors of the file.
ELSEWHERE = {
    "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_encoder_decoder", "label2id", "model_type", "num_hidden_layers",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "transformers_version", "use_cache", "vocab_size",
}  # fmt: skip
ROTATIONS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
]  # fmt: skip


def others(field: str, value: Any) -> list[Any]:
    """Values that a configuration could have instead."""
    if field == "rope_parameters":
        return [{"rope_theta": 2e4, "rope_type": "default"}] + [
            {"rope_theta": 1e4, **one} for one in ROTATIONS
        ]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, max(1, value // 2)] if value else [1]
    if isinstance(value, float):
        return [3 * value or 0.5]
    if value is None:
        return [3, True, 0.5]
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [[kind] * len(value) for kind in ("sliding_attention", "full_attention", "dense", "sparse")]
    if isinstance(value, str):
        return ["gelu", "sigmoid", "softmax", "greedy", "group_limited_greedy", "noaux_tc"]
    return []


def logits(config: Any, weights: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Of these weights under another configuration; None where it has other tensors."""
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = peers.transformers.AutoModelForCausalLM.from_config(config)
    if {name: one.shape for name, one in model.state_dict().items()} != {
        name: one.shape for name, one in weights.items()
    }:
        return None
    with torch.random.fork_rng():
        model = peers.transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(weights)
    return tiny.reference_logits(model, PROMPT)


def overlooked(name: str, read: Callable[[Any], ModelSpec], only: str = "") -> set[str]:
    """Fields, with their other values, that move the logits of `transformers` and not what `read` makes of them."""
    model = tiny.build(name)
    weights, fields = model.state_dict(), json.loads(json.dumps(model.config.to_dict()))
    expected, own, found = tiny.reference_logits(model, PROMPT), read(fields), set()
    for field, value in fields.items():
        for other in () if field in ELSEWHERE or only not in field else others(field, value):
            changed = {**fields, field: other}
            try:
                if read(changed) != own:
                    continue
            except ModelError:
                continue
            try:
                actual = logits(type(model.config).from_dict(dict(changed)), weights)
            except Exception:  # transformers refuses it, each class in its own way
                continue
            if actual is None or (actual - expected).abs().max() > 1e-4:
                found.add(f"{field}={other!r}")
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [*COMMON, *thorough.rare(*(one for one in tiny.FAMILIES if one not in COMMON))]
)
def test_a_field_that_changes_the_numbers_changes_the_spec_or_is_refused(name: str) -> None:
    assert not overlooked(name, spec_from_config)


def test_a_reader_that_overlooks_a_window_is_noticed() -> None:
    def careless(config: dict[str, Any]) -> ModelSpec:
        return spec_from_config({**config, "sliding_window": 13})

    assert overlooked("phi3", careless, only="sliding_window") == {"sliding_window=26", "sliding_window=6"}


REFUSED = (
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "diffllama", "exaone4", "falcon", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "lfm2", "mamba", "minicpm3", "ministral3", "nemotron", "olmo", "olmo2", "olmoe", "opt",
    "phi", "phimoe", "qwen2_moe", "qwen3_next", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


@pytest.mark.parametrize("architecture", REFUSED)
def test_other_architectures_are_refused_by_name(architecture: str) -> None:
    """Each differs from ours by something that the numbers of its configuration do not show."""
    config = peers.transformers.AutoConfig.for_model(architecture).to_dict()
    with pytest.raises(ModelError, match=f"unknown architecture '{architecture}'.*known: llama"):
        spec_from_config(config)


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    model = tiny.save("deepseek_v3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "kimi_k2"}
    spec = spec_from_config(config)
    decoder = Decoder(spec)
    fill_decoder(decoder, FolderWeights(tmp_path, spec))
    expected = tiny.reference_logits(model, PROMPT)
    torch.testing.assert_close(Stepper(decoder).feed(PROMPT, chunk=17), expected, atol=2e-4, rtol=0)
