"""Names and shapes of a decoder's parameters, from its spec alone. Read by the naming tables, the memory
ledger and the planner, which must know a model's size before anything is allocated.

Names are those of `cumulo.models.decoder.Decoder`; fused parameters are fused here too.
"""

from cumulo.spec.model import ModelSpec, MoESpec

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(spec: ModelSpec) -> Shapes:
    """Every parameter of the decoder in the order of computation: name to shape."""
    shapes: Shapes = {"embed.weight": (spec.vocab_size, spec.hidden)}
    if spec.learned_positions:
        shapes["positions.weight"] = (spec.max_context, spec.hidden)
    for layer in range(spec.layers):
        parts = layer_shapes(spec, spec.is_moe_layer(layer))
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    shapes |= _norm("final_norm", spec)
    if not spec.tied_embeddings:
        shapes["head.weight"] = (spec.vocab_size, spec.hidden)
    return shapes


def layer_shapes(spec: ModelSpec, has_experts: bool) -> Shapes:
    """The parameters of one layer, of those with experts or of those without: all of a kind are alike."""
    shapes = _norm("attention_norm", spec) | _attention(spec) | _norm("ffn_norm", spec)
    if has_experts and spec.moe is not None:
        return shapes | _experts(spec, spec.moe)
    return shapes | _feed_forward("ffn", spec, spec.ffn_hidden)


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    return shapes | {f"{name}.bias": (outputs,)} if bias else shapes


def _norm(name: str, spec: ModelSpec) -> Shapes:
    parts = ("weight", "bias") if spec.norm_bias else ("weight",)
    return {f"{name}.{part}": (spec.hidden,) for part in parts}


def _attention(spec: ModelSpec) -> Shapes:
    if spec.mla is None:
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        shapes = _linear("attention.qkv", rows, spec.hidden, spec.qkv_bias)
        if spec.qk_norm:
            shapes |= {f"attention.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
        return shapes | _linear("attention.output", spec.hidden, spec.heads * spec.head_dim, spec.output_bias)
    mla = spec.mla
    query_rows = spec.heads * (mla.nope_head_dim + mla.rope_head_dim)
    if mla.q_rank is None:
        shapes = _linear("attention.q", query_rows, spec.hidden)
    else:
        shapes = _linear("attention.q_a", mla.q_rank, spec.hidden, spec.qkv_bias)
        shapes["attention.q_a_norm.weight"] = (mla.q_rank,)
        shapes |= _linear("attention.q_b", query_rows, mla.q_rank)
    shapes |= _linear("attention.kv_a", mla.kv_rank + mla.rope_head_dim, spec.hidden, spec.qkv_bias)
    shapes["attention.kv_a_norm.weight"] = (mla.kv_rank,)
    shapes |= _linear("attention.kv_b", spec.heads * (mla.nope_head_dim + mla.value_head_dim), mla.kv_rank)
    return shapes | _linear(
        "attention.output", spec.hidden, spec.heads * mla.value_head_dim, spec.output_bias
    )


def _feed_forward(name: str, spec: ModelSpec, width: int) -> Shapes:
    up = ("gate_up", 2 * width) if spec.gated_ffn else ("up", width)
    inward = _linear(f"{name}.{up[0]}", up[1], spec.hidden, spec.mlp_bias)
    return inward | _linear(f"{name}.down", spec.hidden, width, spec.mlp_bias)


def _experts(spec: ModelSpec, moe: MoESpec) -> Shapes:
    shapes = _linear("ffn.router", moe.experts, spec.hidden)
    if moe.selection_bias:
        shapes["ffn.router.selection_bias"] = (moe.experts,)
    if spec.gated_ffn:
        shapes["ffn.experts.gate_up"] = (moe.experts, 2 * moe.expert_hidden, spec.hidden)
    else:
        shapes["ffn.experts.up"] = (moe.experts, moe.expert_hidden, spec.hidden)
    shapes["ffn.experts.down"] = (moe.experts, spec.hidden, moe.expert_hidden)
    return shapes | _feed_forward("ffn.shared", spec, moe.shared_hidden) if moe.shared_hidden else shapes
