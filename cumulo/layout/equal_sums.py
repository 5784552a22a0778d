"""Sums whose bits do not depend on how many ranks share them, for the batch-invariant mode: in how many parts each
is added up, and for which models and layouts that cannot be. The GPU's kernels and the engine's assembly ask.

A product whose inputs lie on several ranks is added up in parts, and the parts in pairs. Ranks that hold whole
branches of this tree send their sums, and one rank that adds up the same tree has the same bits (Zhang et al. 2025,
"Deterministic Inference across Tensor Parallel Sizes"). Numbers of parts that are no powers of two are added one by
one: then one rank and as many ranks as parts agree.
"""

from collections.abc import Iterator

from cumulo.layout.serving import ServingLayout
from cumulo.spec.model import ModelSpec

USUAL_PARTS = 4
_CODED_COLUMNS = 128  # of a matrix in 4 bits that lie together
_STEP, _STEPS = (
    64,
    {"float32": 32},
)  # numbers that the loop of an invariant product adds up at a time, by dtype


def whole_parts(shares: int, most: int = USUAL_PARTS) -> int:
    """In how many parts one rank adds up what `shares` heads or experts give."""
    return next((parts for parts in (most, 4, 2, 3) if parts <= most and shares % parts == 0), 1)


def parts_of(shares: int, ranks: int = 1, most: int = USUAL_PARTS) -> int:
    """In how many parts a rank adds up what it has of such a sum; 1: as it comes."""
    whole = whole_parts(shares, most)
    return whole // ranks if whole % ranks == 0 else 1


def parts_within(width: int, parts: int, step: int) -> int:
    """At most so many parts of a sum over `width` numbers, each of whole steps of the loop that adds them."""
    while parts > 1 and width % (parts * step):
        parts //= 2
    return parts


def invariant_ep(spec: ModelSpec, layout: ServingLayout) -> int:
    """Over how many ranks experts are spread in the batch-invariant mode: whole ones where tp would cut them, since
    sums of cut ones are never those of one rank."""
    cut = spec.moe is not None and layout.ep == 1 and layout.tp > 1
    spreads = cut and spec.moe is not None and spec.moe.experts % layout.stage_ranks == 0
    return layout.stage_ranks if spreads else layout.ep


def equality_note(spec: ModelSpec, layout: ServingLayout, most: int, weights: str, dtype: str) -> str:
    """Whether ranks in the batch-invariant mode have the bits of one rank, for whoever starts them."""
    step = _STEPS.get(dtype, _STEP)
    if problems := list(unequal_sums(spec, layout, most, weights=weights, step=step)):
        return (
            "batch-invariant, but the bits differ from one rank's: "
            + "; ".join(problems)
            + ": they depend on the number of ranks, and still not on the batch"
        )
    return "batch-invariant, with the bits of one rank" + (
        f" that has --invariant-tp {most}" if most != USUAL_PARTS else ""
    )


def unequal_sums(
    spec: ModelSpec, layout: ServingLayout, most: int, *, weights: str = "auto", step: int = _STEP
) -> Iterator[str]:
    """What of a model one rank and the ranks of this layout add up in different orders, in words. `most`: parts of
    a sum; `step`: numbers that a product's loop adds up at a time."""
    moe, tp = spec.moe, layout.tp
    if tp > 1:
        whole = whole_parts(spec.heads, most)
        for name, width in _cut_widths(spec):
            parts = parts_within(width, whole, step)
            if not _shared_evenly(parts, tp):
                yield f"{name} ({width:,} numbers) is added up in {_count(parts)}, which {tp} ranks cannot share"
            elif weights == "int4" and width % _CODED_COLUMNS == 0 and width // tp % _CODED_COLUMNS:
                yield f"{name} ({width:,} numbers) is cut inside a group of {_CODED_COLUMNS} weights in 4 bits"
    if moe is not None and layout.ep == 1 and tp > 1:
        yield f"tp {tp} cuts every expert; ranks that divide their number ({moe.experts}) hold whole ones"
    if moe is not None and not _shared_evenly(parts := whole_parts(moe.experts, most), layout.ep):
        yield f"{moe.experts} experts are added up in {_count(parts)}, which {layout.ep} ranks cannot share"


def _cut_widths(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """The widths of the products whose inputs tensor parallelism spreads over ranks."""
    head_dim = spec.head_dim if spec.mla is None else spec.mla.value_head_dim
    yield "the attention output", spec.heads * head_dim
    if spec.moe is None or spec.moe.dense_layers:
        yield "the feed-forward", spec.ffn_hidden
    if spec.moe is not None and spec.moe.shared_hidden:
        yield "the shared expert", spec.moe.shared_hidden


def _shared_evenly(parts: int, ranks: int) -> bool:
    """Whether ranks hold whole branches of the tree."""
    return ranks in (1, parts) or (parts % ranks == 0 and parts & (parts - 1) == 0)


def _count(parts: int) -> str:
    return "one part" if parts == 1 else f"{parts} parts"
