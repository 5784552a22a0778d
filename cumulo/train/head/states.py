"""What a head sees of a model, and what it is taught: the model's hidden states over whole texts, computed without
a cache. A trainer calls it for every batch where computing is cheaper than keeping (a GPU: states are thousands of
bytes a token).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.errors import ConfigError
from cumulo.models.attention import Attention
from cumulo.models.batch import ForwardBatch
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.heads.eagle import eagle_layers
from cumulo.models.rope import Rotation


@torch.no_grad()
def hidden_states(decoder: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of texts [examples, n], filled up at their ends: what a head sees [examples, n, features], and the model's
    last states, normed [examples, n, hidden]."""
    examples, n = tokens.shape
    tapped, seen = eagle_layers(decoder.spec.layers), list[Tensor]()
    x = decoder.embed.rows(tokens.flatten())
    rotation = decoder.rotary.rotation_at(torch.arange(n, device=tokens.device).repeat(examples))
    for index, layer in enumerate(decoder.layers):
        seen += [x] * tapped.count(index)
        assert isinstance(layer, Layer)
        x, _, _ = attended(layer, x, rotation, examples)
    return torch.cat(seen, dim=-1).unflatten(0, (examples, n)), decoder.final_norm(x).unflatten(
        0, (examples, n)
    )


def attended(layer: Layer, x: Tensor, rotation: Rotation, examples: int) -> tuple[Tensor, Tensor, Tensor]:
    """A layer over whole texts [examples x n, hidden]; its keys and values [examples, kv_heads, n, head_dim]."""
    attention, n = layer.attention, len(x) // examples
    if not isinstance(attention, Attention) or (attention.window or n) < n:
        raise ConfigError("a head is trained for models with grouped attention over the whole text so far")
    query, key, value = (
        one.unflatten(0, (examples, n)).transpose(1, 2)
        for one in attention.project(layer.attention_norm(x), rotation)
    )
    mixed = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=attention.scale, enable_gqa=True
    )
    x = x + attention.output(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
    return x + layer.ffn(layer.ffn_norm(x)), key, value


def one_sequence(tokens: Tensor, places: Tensor) -> ForwardBatch:
    """A step that computes one whole sequence, in a cache of one block."""

    def small(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=places.device)

    return ForwardBatch(
        token_ids=tokens, positions=places, slots=places, query_starts=small(0, len(places)),
        context_lengths=small(len(places)), block_tables=small(0)[None], logit_rows=places[-1:],
    )  # fmt: skip
