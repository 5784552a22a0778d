"""transformers' models through backend="cumulo" equal eager PyTorch, forward and backward, with less traffic."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cumulo.compile.passes import compiler

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
)  # fmt: skip


def smollm2() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def mixture() -> Any:
    more = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **more))


def step(run: Callable[..., Any], model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    output = run(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    return [output.loss.detach(), output.logits.detach(), *(one.grad.clone() for one in model.parameters())]


@pytest.mark.long
@pytest.mark.parametrize("make", [smollm2, qwen3, mixture])
def test_a_model_equals_eager_forward_and_backward_with_less_traffic(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, ids = make(), torch.randint(0, 96, (2, 8))
    expected = step(model, model, ids)
    with compiler.recording() as graphs:
        found = step(torch.compile(model, backend="cumulo"), model, ids)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    assert {"forward", "backward"} <= {graph.stage for graph in graphs}
    for graph in graphs:
        assert graph.kernels_after <= graph.operations_before
        assert graph.after.traffic_bytes <= graph.before.traffic_bytes
    patterns = {name for graph in graphs for name, *_ in graph.patterns()}
    assert {"rotary", "SwiGLU", "residual + norm"} <= patterns or make is mixture
