"""The spec of a new model, from a configuration and a vocabulary. Pure; for `config.py` and `prepare.py`."""

from typing import TYPE_CHECKING

from cumulo.spec.model import ModelSpec

if TYPE_CHECKING:
    from cumulo.train.decide.config import TrainConfig


def new_spec(config: "TrainConfig", vocabulary: int, eos_ids: tuple[int, ...]) -> ModelSpec:
    """`vocabulary`: the tokenizer's size, before it is filled up."""
    model = config.model
    ffn_hidden = model.ffn_hidden
    if ffn_hidden is None:
        ffn_hidden = -(-model.hidden * 8 // 3 // 64) * 64
    return ModelSpec(
        family=model.family,
        vocab_size=-(-vocabulary // model.vocab_multiple) * model.vocab_multiple,
        hidden=model.hidden,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        head_dim=model.head_dim or model.hidden // model.heads,
        ffn_hidden=model.moe.expert_hidden if model.family == "mixtral" and model.moe else ffn_hidden,
        max_context=config.data.sequence_length,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        tied_embeddings=model.tied_embeddings,
        qk_norm=model.family.startswith("qwen3"),
        moe=model.moe,
        bos_token_id=None,
        eos_token_ids=eos_ids,
        dtype=config.dtype,
    )
