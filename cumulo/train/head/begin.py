"""A head before it is trained: it begins as the served model's last layer."""

import numpy as np
import torch
from torch import Tensor

from cumulo.errors import ConfigError
from cumulo.models.attention import Attention
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.heads.eagle import EagleHead
from cumulo.models.linear import Linear
from cumulo.models.moe import FeedForward
from cumulo.spec.model import ModelSpec
from cumulo.train.head.answers import OwnAnswer
from cumulo.train.head.config import HeadConfig


def new_head(config: HeadConfig, decoder: Decoder, answers: list[OwnAnswer]) -> EagleHead:
    """A head that begins as the model's last layer on its highest tapped hidden state."""
    spec = decoder.spec
    tokens = np.concatenate([one.tokens[one.prompt_length :] for one in answers])
    counts = np.bincount(tokens, minlength=spec.vocab_size)
    frequent = np.argsort(-counts, kind="stable")[: min(config.draft_vocabulary, spec.vocab_size)]
    own = ModelSpec(
        family="llama", vocab_size=spec.vocab_size, hidden=spec.hidden, layers=1, heads=spec.heads,
        kv_heads=spec.kv_heads, head_dim=spec.head_dim, ffn_hidden=config.ffn_hidden or spec.ffn_hidden,
        max_context=spec.max_context, norm_eps=spec.norm_eps, rope_theta=spec.rope_theta,
    )  # fmt: skip
    # Small steps are lost in 16 bits.
    head = EagleHead(
        own, 3 * spec.hidden, len(frequent), dtype=torch.promote_types(decoder.dtype, torch.float32)
    )
    head.token_of = torch.from_numpy(np.sort(frequent).astype(np.int64))
    layer, hidden = decoder.layers[-1], spec.hidden
    assert isinstance(layer, Layer)
    if not isinstance(layer.attention, Attention) or not isinstance(layer.ffn, FeedForward):
        raise ConfigError("a head is trained for dense models with grouped attention so far")
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, 2 * hidden :].copy_(torch.eye(hidden))
        head.qkv.weight[:, hidden:].copy_(matrix(layer.attention.qkv))
        head.qkv.weight[:, :hidden].normal_(std=0.02)
        head.output.weight.copy_(matrix(layer.attention.output))
        # A wider feed-forward layer begins as the model's with units whose outputs are not used yet.
        head.ffn.gate_up.weight.normal_(std=0.02)
        head.ffn.down.weight.zero_()
        width = min(own.ffn_hidden, spec.ffn_hidden)
        both = zip(head.ffn.gate_up.weight.chunk(2), matrix(layer.ffn.gate_up).chunk(2), strict=True)
        for ours, theirs in both:
            ours[:width].copy_(theirs[:width])
        head.ffn.down.weight[:, :width].copy_(matrix(layer.ffn.down)[:, :width])
        last = decoder.embed if spec.tied_embeddings else decoder.head
        head.head.weight.copy_(last.rows(head.token_of.to(decoder.final_norm.weight.device)))
        for norm, like in (
            (head.token_norm, layer.attention_norm), (head.stream_norm, layer.attention_norm),
            (head.ffn_norm, layer.ffn_norm), (head.final_norm, decoder.final_norm),
        ):  # fmt: skip
            norm.weight.copy_(like.weight)
        head.token_norm.weight.fill_(1.0)
        # What it begins with foresees the token that is known already: it should not be so sure of that.
        head.final_norm.weight.mul_(0.3)
    head.rotary.serve(spec.max_context)
    return head


def matrix(linear: Linear) -> Tensor:
    """The plain weights, whatever they are packed into."""
    device = "cpu" if linear.packed is not None else linear.weight.device
    return linear.rows(torch.arange(linear.shape[0], device=device))
