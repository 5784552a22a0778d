"""Which models the GPU's kernels cannot play, from the spec alone. Asked by the GPU decoder, and by the memory
ledger and the assembly, which must know before anything is loaded."""

from cumulo.spec.model import ModelSpec

_MOST_HEADS_PER_KV_HEAD = 64  # attention packs them into one tile


def obstacle_of(spec: ModelSpec, dtype: str) -> str | None:
    """What keeps a model from being played by the GPU's kernels, or None; then PyTorch's operators play it."""
    if dtype == "float64":
        return "the kernels compute in 32 bits or fewer, not in float64"
    if spec.mla is not None:
        return "latent attention runs layer by layer"
    if spec.head_dim & (spec.head_dim - 1) or spec.rope_dim != spec.head_dim:
        return f"{spec.rope_dim} of {spec.head_dim} numbers of a head are rotated: all of a power of two are needed"
    if spec.heads // spec.kv_heads > _MOST_HEADS_PER_KV_HEAD:
        return f"{spec.heads // spec.kv_heads} heads share keys and values: {_MOST_HEADS_PER_KV_HEAD} at most can"
    if spec.moe is not None and spec.moe.groups > 1:
        return "group-limited routing runs layer by layer"
    return None
