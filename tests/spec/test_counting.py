"""Counts that follow from a spec, against transformers, torch's own FLOP counter and published sizes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cumulo.errors import ModelError
from cumulo.spec.counting import flops_per_token, parameter_count, weight_bytes
from cumulo.spec.from_huggingface import spec_from_config
from tests.models import tiny
from tests.spec import published
from tests.spec.active import active_parameter_count


@pytest.mark.long
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_parameters_are_as_many_as_transformers_has(name: str) -> None:
    model = tiny.build(name)
    expected = sum(parameter.numel() for parameter in model.parameters())
    # transformers keeps the routing bias as a buffer
    expected += sum(b.numel() for key, b in model.named_buffers() if "e_score_correction_bias" in key)
    assert parameter_count(spec_from_config(model.config.to_dict())) == expected


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama_31_8b", 8_030_261_248),
        ("mistral_7b", 7_241_732_096),
        ("qwen25_7b", 7_615_616_512),
        ("qwen3_06b", 596_049_920),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("deepseek_v2_lite", 15_706_484_224),
        ("deepseek_v3", 671_026_419_200),
    ],
)
def test_published_models_have_as_many_parameters_as_their_files(name: str, total: int) -> None:
    assert parameter_count(spec_from_config(published.ALL[name])) == total


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral_8x7b", 12.9), ("qwen3_30b_a3b", 3.3), ("deepseek_v3", 37.0)]
)
def test_published_mixtures_have_as_many_active_parameters_as_their_papers_say(
    name: str, billions: float
) -> None:
    active = active_parameter_count(spec_from_config(published.ALL[name]))
    assert active / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name", ["llama", "smollm2", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_flops_of_one_token_are_those_torch_counts_in_transformers(name: str) -> None:
    model = tiny.build(name)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.tensor([[5]]))
    rotary = (
        2 * spec_from_config(model.config.to_dict()).rope_dim
    )  # transformers' angles are a matrix product
    assert (
        abs(counter.get_total_flops() - flops_per_token(spec_from_config(model.config.to_dict()), 1))
        <= rotary
    )


def test_attention_flops_grow_with_context_up_to_the_window() -> None:
    spec = spec_from_config(published.MISTRAL_7B)
    per_position = 2 * 32 * 32 * (128 + 128)
    assert flops_per_token(spec, 1001) - flops_per_token(spec, 1000) == per_position
    assert flops_per_token(spec, 4096) == flops_per_token(spec, 30000)


def test_latent_attention_is_counted_in_the_absorbed_form() -> None:
    spec = spec_from_config(published.DEEPSEEK_V3)
    assert flops_per_token(spec, 101) - flops_per_token(spec, 100) == 2 * 61 * 128 * (576 + 512)


def test_weight_bytes_follow_the_type() -> None:
    spec = spec_from_config(published.LLAMA_31_8B)
    assert weight_bytes(spec) == 2 * parameter_count(spec)
    assert weight_bytes(spec, "q4_0") == parameter_count(spec) * 18 // 32
    with pytest.raises(ModelError, match=r"'int3'.*float32"):
        weight_bytes(spec, "int3")
