"""Whether the numbers of a ModelSpec can belong together. Called by the makers of specs, so that a damaged
configuration is refused with the field's name instead of failing somewhere inside a matrix product."""

from collections.abc import Iterator

from cumulo.errors import ModelError
from cumulo.spec.model import ModelSpec, MoESpec
from cumulo.spec.model_file import from_dict, to_dict


def checked(spec: ModelSpec, where: str) -> ModelSpec:
    """`spec` itself, or a ModelError that lists everything impossible in it; `where` names the file."""
    try:
        from_dict(to_dict(spec))  # every field is of its type
    except ModelError as error:
        raise ModelError(f"{where} describes an impossible {spec.family} model: {error}") from error
    if problems := list(_problems(spec)):
        raise ModelError(f"{where} describes an impossible {spec.family} model: {'; '.join(problems)}")
    return spec


def refuse_unplayable(spec: ModelSpec) -> None:
    """A ModelError for a model that can be planned and counted only. Called before a decoder is built."""
    if not spec.gated_ffn or spec.learned_positions or spec.norm_bias:
        raise ModelError(
            f"a {spec.family} model with learned positions, LayerNorm or an ungated feed-forward can be planned, "
            "but not run here; what runs is of the Llama, Qwen, Mistral, Mixtral and DeepSeek families"
        )


def _problems(spec: ModelSpec) -> Iterator[str]:
    for name in (
        "vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn_hidden", "max_context",
        "rope_theta", "norm_eps",
    ):  # fmt: skip
        if not getattr(spec, name) > 0:
            yield f"{name} must be more than 0, got {getattr(spec, name)}"
    if spec.kv_heads > 0 and spec.heads % spec.kv_heads:
        yield f"{spec.heads} heads cannot share {spec.kv_heads} key/value heads evenly"
    if spec.rope_dim % 2:
        yield f"rotary embedding needs an even number of dimensions, got {spec.rope_dim}"
    if spec.mla is not None and (spec.mla.kv_rank % 2 or spec.mla.nope_head_dim % 2):
        yield "latent attention needs an even kv_rank and nope_head_dim, so that rotated pairs are aligned"
    if spec.sliding_window is not None and spec.sliding_window < 1:
        yield f"sliding_window must be 1 or more, got {spec.sliding_window}"
    if spec.rope_scaling is not None:
        if not spec.rope_scaling.factor > 0:
            yield f"the rope scaling factor must be more than 0, got {spec.rope_scaling.factor}"
        factors = spec.rope_scaling.factors
        if spec.rope_scaling.kind == "factors" and len(factors) != spec.rope_dim // 2:
            yield f"{len(factors)} rope factors for {spec.rope_dim // 2} frequencies"
    if spec.moe is not None:
        yield from _routing_problems(spec.moe)


def _routing_problems(moe: MoESpec) -> Iterator[str]:
    if moe.experts < 1 or moe.groups < 1 or moe.experts % moe.groups:
        yield f"{moe.experts} experts cannot form {moe.groups} equal groups"
        return
    if not 1 <= moe.top_groups <= moe.groups:
        yield f"{moe.top_groups} of {moe.groups} expert groups cannot be chosen"
    size = moe.experts // moe.groups
    if moe.groups > 1 and moe.group_score == "top2sum" and size < 2:
        yield f"groups of {size} expert have no two best scores to add up"
    if not 1 <= moe.experts_per_token <= size * moe.top_groups:
        yield f"{moe.experts_per_token} experts per token cannot be chosen from {size * moe.top_groups}"
    if moe.expert_hidden < 1:
        yield f"the experts' width must be 1 or more, got {moe.expert_hidden}"
