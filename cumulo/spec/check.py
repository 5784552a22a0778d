"""Whether the numbers of a ModelSpec can belong together. Called by the makers of specs, so that a damaged
configuration is refused with the field's name instead of failing somewhere inside a matrix product."""

from collections.abc import Iterator

from cumulo.errors import ModelError
from cumulo.spec.model import ModelSpec, MoESpec, RopeScaling
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


_PLANNED_ONLY = ("llama4", "gpt_oss")  # their routing, sinks and chunks of attention are not played


def unplayable(spec: ModelSpec) -> str:
    """Why a model can be planned and counted only; empty: it can be run."""
    what = ""
    if not spec.gated_ffn or spec.learned_positions or spec.norm_bias:
        what = " with learned positions, LayerNorm or an ungated feed-forward"
    elif spec.family not in _PLANNED_ONLY:
        return ""
    return (
        f"a {spec.family} model{what} can be planned, but not run; Cumulo runs the Llama, Qwen, Mistral, Mixtral "
        "and DeepSeek families"
    )


def refuse_unplayable(spec: ModelSpec) -> None:
    """A ModelError for such a model. Called before a decoder is built."""
    if why := unplayable(spec):
        raise ModelError(why)


# Far beyond every published model; a file that claims more is damaged or hostile, and must not size anything.
_MOST = {
    "vocab_size": 1 << 24, "hidden": 1 << 20, "layers": 10_000, "heads": 1 << 16, "kv_heads": 1 << 16,
    "head_dim": 1 << 16, "ffn_hidden": 1 << 24, "max_context": 1 << 27, "rope_theta": 1e12, "norm_eps": 1.0,
}  # fmt: skip
_MOST_EXPERTS = 1 << 16
_MOST_SCALING = 1e6
_MOST_ENDS = 64  # tokens that end an answer


def _problems(spec: ModelSpec) -> Iterator[str]:
    for name, most in _MOST.items():
        if not 0 < getattr(spec, name) <= most:
            yield f"{name} must be more than 0 and at most {most:,}, got {_number(getattr(spec, name))}"
    for name, tokens in (("bos_token_id", (spec.bos_token_id,)), ("eos_token_id", spec.eos_token_ids)):
        if len(tokens) > _MOST_ENDS:
            yield f"{name} lists {len(tokens):,} tokens; {_MOST_ENDS} is the most"
        outside = [token for token in tokens if token is not None and not 0 <= token < spec.vocab_size]
        if outside:
            yield f"{name} is {_number(outside[0])}, but the vocabulary has {_number(spec.vocab_size)} tokens"
    if spec.kv_heads > 0 and spec.heads % spec.kv_heads:
        yield f"{spec.heads} heads cannot share {spec.kv_heads} key/value heads evenly"
    if spec.rope_dim % 2:
        yield f"rotary embedding needs an even number of dimensions, got {spec.rope_dim}"
    if spec.mla is not None and (spec.mla.kv_rank % 2 or spec.mla.nope_head_dim % 2):
        yield "latent attention needs an even kv_rank and nope_head_dim, so that rotated pairs are aligned"
    if spec.sliding_window is not None and spec.sliding_window < 1:
        yield f"sliding_window must be 1 or more, got {spec.sliding_window}"
    if spec.rope_scaling is not None:
        yield from _scaling_problems(spec.rope_scaling, spec.rope_dim)
    if spec.mla is not None:
        widths = (spec.mla.kv_rank, spec.mla.nope_head_dim, spec.mla.rope_head_dim, spec.mla.value_head_dim)
        if not all(0 < width <= _MOST["head_dim"] for width in (*widths, spec.mla.q_rank or 1)):
            yield "the widths of latent attention must be more than 0 and at most 65,536"
    if spec.moe is not None:
        yield from _routing_problems(spec.moe)


def _scaling_problems(scaling: RopeScaling, rope_dim: int) -> Iterator[str]:
    if not 0 < scaling.factor <= _MOST_SCALING:
        yield f"the rope scaling factor must be more than 0 and at most {_MOST_SCALING:,.0f}, got {scaling.factor}"
    if not 0 < scaling.original_context <= _MOST["max_context"]:
        yield f"the context before rope scaling must be 1 or more tokens, got {_number(scaling.original_context)}"
    numbers = (
        scaling.low_freq_factor, scaling.high_freq_factor, scaling.beta_fast, scaling.beta_slow, scaling.mscale,
        scaling.mscale_all_dim, 1.0 if scaling.attention_factor is None else scaling.attention_factor,
    )  # fmt: skip
    if not all(0 <= number <= _MOST_SCALING for number in numbers):
        yield f"the rope scaling's parameters must be 0 to {_MOST_SCALING:,.0f}, got {numbers}"
    if scaling.kind == "llama3" and not scaling.low_freq_factor < scaling.high_freq_factor:
        yield "the rope scaling's low_freq_factor must be less than its high_freq_factor"
    if scaling.kind == "yarn" and not (scaling.beta_fast > 0 and scaling.beta_slow > 0):
        yield "the rope scaling's beta_fast and beta_slow must be more than 0"
    if scaling.kind == "factors":
        if len(scaling.factors) != rope_dim // 2:
            yield f"{len(scaling.factors)} rope factors for {rope_dim // 2} frequencies"
        if not all(0 < factor <= _MOST_SCALING for factor in scaling.factors):
            yield "rope factors must be more than 0 and finite"


def _number(value: float) -> str:
    """Someone else's number, which may have thousands of digits."""
    return f"{value:,}" if abs(value) < 10**18 else f"a number of {len(str(abs(value)))} digits"


def _routing_problems(moe: MoESpec) -> Iterator[str]:
    if moe.experts > _MOST_EXPERTS or max(moe.expert_hidden, moe.shared_hidden) > _MOST["ffn_hidden"]:
        yield f"{_number(moe.experts)} experts of width {_number(moe.expert_hidden)} are more than any model has"
        return
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
