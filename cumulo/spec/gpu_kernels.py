"""Which models the GPU's kernels cannot play, from the spec alone. Asked by the GPU decoder, and by the memory
ledger and the assembly, which must know before anything is loaded."""

from cumulo.spec.model import MLASpec, ModelSpec

_MOST_HEADS_PER_KV_HEAD = 64  # attention packs them into one tile
_HIGHEST_LATENT_RANK = 512  # 64 rows of so many sums fill half of a multiprocessor's registers
_LONGEST_LATENT_BYTES = 1280  # of a key: shared memory holds 64 queries and 96 keys of this length


def obstacle_of(spec: ModelSpec, dtype: str) -> str | None:
    """What keeps a model from being played by the GPU's kernels, or None; then PyTorch's operators play it."""
    if dtype == "float64":
        return "the kernels compute in 32 bits or fewer, not in float64"
    if spec.mla is not None:
        obstacle = _latent_obstacle(spec.mla, 4 if dtype == "float32" else 2)
        if obstacle is not None:
            return obstacle
    elif spec.head_dim & (spec.head_dim - 1) or spec.rope_dim != spec.head_dim:
        return f"{spec.rope_dim} of {spec.head_dim} numbers of a head are rotated: all of a power of two are needed"
    elif spec.heads // spec.kv_heads > _MOST_HEADS_PER_KV_HEAD:
        return f"{spec.heads // spec.kv_heads} heads share keys and values: {_MOST_HEADS_PER_KV_HEAD} at most can"
    return None


def adapter_obstacle_of(spec: ModelSpec) -> str | None:
    """What keeps the GPU's kernels from adding adapters to a model, or None; then PyTorch's operators play it."""
    if spec.moe is not None or spec.mla is not None:
        return "adapters of mixtures and of latent attention are added by PyTorch's operators"
    return None


def _latent_obstacle(mla: MLASpec, bytes_per_number: int) -> str | None:
    rank, rope = mla.kv_rank, mla.rope_head_dim
    if rank & (rank - 1) or rope & (rope - 1) or min(rank, rope) < 16:
        return f"latent attention of rank {rank} with {rope} rotated numbers: powers of two from 16 up are needed"
    if rank > _HIGHEST_LATENT_RANK or (rank + rope) * bytes_per_number > _LONGEST_LATENT_BYTES:
        return (
            f"latent attention of rank {rank} with {rope} rotated numbers of {bytes_per_number} bytes does not fit "
            "into a multiprocessor"
        )
    return None
