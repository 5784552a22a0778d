"""The smaller model that one rank of tensor and expert parallelism runs. Trainer and planner ask. Pure."""

from dataclasses import replace

from cumulo.spec.model import ModelSpec


def local_spec(spec: ModelSpec, tp: int, ep: int = 1) -> ModelSpec:
    """Sizes of a rank's slices. With `ep` only the rank's own experts are counted, which are whole; without it all
    are, since the router knows them all. Where there are more ranks than key/value heads, each has one."""
    moe = spec.moe
    if moe is not None:
        moe = replace(
            moe,
            expert_hidden=moe.expert_hidden if ep > 1 else max(1, moe.expert_hidden // tp),
            shared_hidden=moe.shared_hidden // tp,
        )
        if ep > 1:
            moe = replace(moe, experts=max(moe.experts_per_token, moe.experts // ep), groups=1, top_groups=1)
    return replace(
        spec,
        heads=spec.heads // tp,
        kv_heads=max(1, spec.kv_heads // tp),
        ffn_hidden=max(1, spec.ffn_hidden // tp),
        vocab_size=max(1, spec.vocab_size // tp),
        moe=moe,
    )
