"""A model's operations, against what torch itself counts when transformers' models compute them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.operations import Share, layer_operations, model_operations
from tests.models import tiny


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_flops_of_forward_and_backward_are_those_torch_counts(name: str) -> None:
    model, tokens = tiny.build(name), 6
    model.set_attn_implementation("eager")
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    spec = spec_from_config(model.config.to_dict())
    found = [operation for _, operation in model_operations(spec)]
    pairs = tokens * tokens  # no mask is used to save work
    with FlopCounterMode(display=False) as forward:
        logits = model(torch.arange(3, 3 + tokens)[None]).logits
    with FlopCounterMode(display=False) as backward:
        logits.square().sum().backward()
    rotary = 2 * spec.rope_dim * tokens  # transformers' angles are a matrix product
    counted = sum(one.forward_flops(tokens, pairs) for one in found)
    assert abs(forward.get_total_flops() - counted) <= rotary
    # Of inputs and of weights; attention has two inputs for each of its two products, and no weights.
    counted = sum(one.forward_flops(tokens, 2 * pairs) + one.forward_flops(tokens) for one in found)
    assert backward.get_total_flops() == counted


def test_both_forms_have_the_same_parameters() -> None:
    for name in tiny.FAMILIES:
        spec = spec_from_config(tiny.build(name).config.to_dict())
        for has_experts in (False, True):
            train, serve = (
                {weight for one in layer_operations(spec, has_experts, form) for weight in one.weights}
                for form in ("train", "serve")
            )
            assert train == serve


def test_a_share_divides_what_is_cut() -> None:
    assert [Share(4, 4).ranks(cut) for cut in ("tensor", "stream", "whole")] == [4, 4, 1]
    assert Share(4).ranks("stream") == 1
