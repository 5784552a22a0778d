"""Where the tensors of a Hugging Face checkpoint go in the decoder. Read by the safetensors loader.

Names are those of the published checkpoints (experts one by one), which is also how `transformers` saves.
"""

import re
from collections.abc import Callable, Iterator

from cumulo.models.files.placement import Placement
from cumulo.spec.model import ModelSpec, MoESpec


def placements(spec: ModelSpec) -> list[Placement]:
    """Every tensor a checkpoint of this spec must hold, and the box of the parameter it fills."""
    return list(_placements(spec))


def ignorable(spec: ModelSpec) -> Callable[[str], bool]:
    """Tensors that real checkpoints carry and this decoder has no use for."""

    def ignored(name: str) -> bool:
        if name.endswith(".rotary_emb.inv_freq"):
            return True  # old Llama conversions stored what follows from the configuration
        if name == "lm_head.weight":
            return spec.tied_embeddings
        beyond = re.match(r"model\.layers\.(\d+)\.", name)
        # DeepSeek-V3 appends its multi-token-prediction module as one more layer, and so does GLM.
        predicts = spec.family in ("deepseek_v3", "glm4_moe_lite")
        return predicts and beyond is not None and int(beyond[1]) >= spec.layers

    return ignored


def _placements(spec: ModelSpec) -> Iterator[Placement]:
    table = (spec.vocab_size, spec.hidden)
    yield Placement("model.embed_tokens.weight", "embed.weight", table)
    for layer in range(spec.layers):
        yield from _layer(spec, layer, f"model.layers.{layer}", f"layers.{layer}")
    yield Placement("model.norm.weight", "final_norm.weight", (spec.hidden,))
    if not spec.tied_embeddings:
        yield Placement("lm_head.weight", "head.weight", table)


def _layer(spec: ModelSpec, layer: int, source: str, target: str) -> Iterator[Placement]:
    yield Placement(f"{source}.input_layernorm.weight", f"{target}.attention_norm.weight", (spec.hidden,))
    yield from _attention(spec, f"{source}.self_attn", f"{target}.attention")
    yield Placement(f"{source}.post_attention_layernorm.weight", f"{target}.ffn_norm.weight", (spec.hidden,))
    if spec.moe is None or not spec.is_moe_layer(layer):
        yield from _feed_forward(spec, f"{source}.mlp", f"{target}.ffn", spec.ffn_hidden)
    elif spec.family == "mixtral":
        names = ("w1", "w3", "w2")
        yield from _experts(spec, spec.moe, f"{source}.block_sparse_moe", f"{target}.ffn", names)
    else:
        names = ("gate_proj", "up_proj", "down_proj")
        yield from _experts(spec, spec.moe, f"{source}.mlp", f"{target}.ffn", names)


def _fused(target: str, parts: list[tuple[str, int]], inputs: int, bias: bool) -> Iterator[Placement]:
    """Projections (name, rows) stacked into one parameter in this order."""
    start = 0
    for source, rows in parts:
        yield Placement(f"{source}.weight", f"{target}.weight", (rows, inputs), (start, 0))
        if bias:
            yield Placement(f"{source}.bias", f"{target}.bias", (rows,), (start,))
        start += rows


def _attention(spec: ModelSpec, source: str, target: str) -> Iterator[Placement]:
    if spec.mla is None:
        query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        parts = [(f"{source}.q_proj", query), (f"{source}.k_proj", key), (f"{source}.v_proj", key)]
        if spec.family == "phi3":  # fused in the file, too
            parts = [(f"{source}.qkv_proj", query + 2 * key)]
        yield from _fused(f"{target}.qkv", parts, spec.hidden, spec.qkv_bias)
        if spec.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield Placement(f"{source}.{name}.weight", f"{target}.{name}.weight", (spec.head_dim,))
        output = [(f"{source}.o_proj", spec.hidden)]
        yield from _fused(f"{target}.output", output, query, spec.output_bias)
        return
    mla = spec.mla
    query = spec.heads * (mla.nope_head_dim + mla.rope_head_dim)
    if mla.q_rank is None:
        yield from _fused(f"{target}.q", [(f"{source}.q_proj", query)], spec.hidden, False)
    else:
        yield from _fused(f"{target}.q_a", [(f"{source}.q_a_proj", mla.q_rank)], spec.hidden, spec.qkv_bias)
        yield Placement(f"{source}.q_a_layernorm.weight", f"{target}.q_a_norm.weight", (mla.q_rank,))
        yield from _fused(f"{target}.q_b", [(f"{source}.q_b_proj", query)], mla.q_rank, False)
    latent = [(f"{source}.kv_a_proj_with_mqa", mla.kv_rank + mla.rope_head_dim)]
    yield from _fused(f"{target}.kv_a", latent, spec.hidden, spec.qkv_bias)
    yield Placement(f"{source}.kv_a_layernorm.weight", f"{target}.kv_a_norm.weight", (mla.kv_rank,))
    expansion = [(f"{source}.kv_b_proj", spec.heads * (mla.nope_head_dim + mla.value_head_dim))]
    yield from _fused(f"{target}.kv_b", expansion, mla.kv_rank, False)
    output = [(f"{source}.o_proj", spec.hidden)]
    yield from _fused(f"{target}.output", output, spec.heads * mla.value_head_dim, spec.output_bias)


def _feed_forward(spec: ModelSpec, source: str, target: str, width: int) -> Iterator[Placement]:
    parts = [(f"{source}.gate_proj", width), (f"{source}.up_proj", width)]
    if spec.family == "phi3":
        parts = [(f"{source}.gate_up_proj", 2 * width)]
    yield from _fused(f"{target}.gate_up", parts, spec.hidden, spec.mlp_bias)
    yield from _fused(f"{target}.down", [(f"{source}.down_proj", spec.hidden)], width, spec.mlp_bias)


def _experts(
    spec: ModelSpec, moe: MoESpec, source: str, target: str, names: tuple[str, str, str]
) -> Iterator[Placement]:
    yield Placement(f"{source}.gate.weight", f"{target}.router.weight", (moe.experts, spec.hidden))
    if moe.selection_bias:
        yield Placement(
            f"{source}.gate.e_score_correction_bias", f"{target}.router.selection_bias", (moe.experts,)
        )
    gate, up, down = names
    inner, outer = (moe.expert_hidden, spec.hidden), (spec.hidden, moe.expert_hidden)
    stack = f"{target}.experts"
    for expert in range(moe.experts):
        own = f"{source}.experts.{expert}"
        yield Placement(f"{own}.{gate}.weight", f"{stack}.gate_up", inner, (expert, 0, 0))
        yield Placement(f"{own}.{up}.weight", f"{stack}.gate_up", inner, (expert, moe.expert_hidden, 0))
        yield Placement(f"{own}.{down}.weight", f"{stack}.down", outer, (expert, 0, 0))
    if moe.shared_hidden:
        yield from _feed_forward(spec, f"{source}.shared_experts", f"{target}.shared", moe.shared_hidden)
