"""Layout: how a training job is spread over ranks, as arithmetic. Trainer, checkpoint and planner read it.

    layout = Layout(dp=2, tp=2, pp=2)
    layout.place(5)                    # Place(pp=1, dp=0, cp=0, tp=1)
    layout.group("dp", 5)              # (5, 7): the ranks that differ from rank 5 in their data only

The mesh is `arange(world).reshape(pp, dp, cp, tp)`: tensor-parallel ranks, which talk most, lie side by side.
Experts are spread over runs of `ep` neighbours in the (dp, cp) plane, which hold different tokens anyway.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from cumulo.errors import ConfigError
from cumulo.pipeline.decide.actions import StagePlacement
from cumulo.pipeline.decide.catalog import family
from cumulo.spec.model import ModelSpec


def divisors(number: int, largest: int) -> list[int]:
    """In order, none above `largest`."""
    return [size for size in range(1, min(number, largest) + 1) if number % size == 0]


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of a number that is nearest to `wanted`, the smaller one of two."""
    return min(divisors(number, number), key=lambda size: abs(size - wanted))


def uneven(axis: str, size: int, what: str, count: int) -> str:
    """Says that `size` ranks of an axis cannot share something, and how many could."""
    return f"{axis} {size} cannot share {count} {what} evenly; {axis} {nearest_divisor(count, size)} can"


Axis = Literal[
    "world", "pp", "dp", "cp", "tp", "data", "ep", "expert_data", "ring", "ulysses", "shard", "copies"
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in the mesh."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How the run is spread over processes: their number is dp × tp × pp × cp."""

    dp: int = 1  # data parallel: copies of the model, each with its own samples
    tp: int = 1  # tensor parallel: each matrix in this many slices
    pp: int = 1  # pipeline stages
    cp: int = 1  # context parallel: each sequence in this many pieces
    ep: int = 1  # expert parallel: experts over this many of the dp × cp ranks
    # What data-parallel ranks share out: 1 optimizer, 2 and gradients, 3 and weights.
    zero: Literal[0, 1, 2, 3] = 0
    sequence_parallel: bool = False  # between its matrices tensor-parallel ranks hold different tokens
    ulysses: int = 1  # groups of this many cp ranks exchange heads; the groups pass keys round a ring
    # Hybrid sharding: ZeRO over this many dp ranks, copies over the rest; null: over all.
    shard: int | None = None
    schedule: str = "1f1b"  # of the pipeline: see `cumulo schedule`
    chunks_per_stage: int | None = None  # null: the schedule's own

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError("; ".join(problems))

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks over which gradients are summed: those with other samples or other pieces of them."""
        return self.dp * self.cp

    @property
    def zero_ranks(self) -> int:
        """Ranks over which ZeRO shares out what it does; 1 without it."""
        return (self.shard or self.dp) * self.cp if self.zero else 1

    @property
    def expert_zero_ranks(self) -> int:
        """... shares out experts: all that hold the same ones. `shard` does not narrow these."""
        return self.data_ranks // self.ep if self.zero else 1

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        """Ranks of an axis' groups and GPUs from one member to the next; dp: all that gradients are summed over."""
        return {
            "tp": (self.tp, 1),
            "cp": (self.cp, self.tp),
            "ep": (self.ep, self.tp),
            "dp": (self.data_ranks, self.tp),
            "pp": (self.pp, self.data_ranks * self.tp),
        }

    def place(self, rank: int) -> Place:
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Place(pp, dp, cp, tp)

    def rank(self, place: Place) -> int:
        return ((place.pp * self.dp + place.dp) * self.cp + place.cp) * self.tp + place.tp

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of an axis: each rank is in exactly one, in the order its members count themselves."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            found.setdefault(self._key(axis, rank), []).append(rank)
        return tuple(tuple(members) for members in found.values())

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that work together with `rank` along an axis, itself included."""
        key = self._key(axis, rank)
        return tuple(other for other in range(self.world) if self._key(axis, other) == key)

    def _key(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """What the members of a group have in common."""
        at = self.place(rank)
        data = at.dp * self.cp + at.cp  # the place in the (dp, cp) plane
        shard = self.shard or self.dp
        keys: dict[Axis, tuple[int, ...]] = {
            "world": (),
            "pp": (at.dp, at.cp, at.tp),
            "dp": (at.pp, at.cp, at.tp),
            "cp": (at.pp, at.dp, at.tp),
            "tp": (at.pp, at.dp, at.cp),
            "data": (at.pp, at.tp),
            "ep": (at.pp, at.tp, data // self.ep),
            "expert_data": (at.pp, at.tp, data % self.ep),  # holders of the same experts
            "ulysses": (at.pp, at.dp, at.tp, at.cp // self.ulysses),
            "ring": (at.pp, at.dp, at.tp, at.cp % self.ulysses),
            # Whom ZeRO shares with: cp ranks hold the same weights, too.
            "shard": (at.pp, at.tp, at.dp // shard),
            "copies": (at.pp, at.tp, at.dp % shard, at.cp),  # holders of the same ZeRO shard
        }
        return keys[axis]

    def __str__(self) -> str:
        """Only what is not the default: `dp2 tp2+sp pp2 (zb-v) zero1`."""
        parts = [
            f"{name}{size}" for name in ("dp", "tp", "pp", "cp", "ep") if (size := getattr(self, name)) > 1
        ]
        text = (
            " ".join(parts).replace(f"tp{self.tp}", f"tp{self.tp}+sp")
            if self.sequence_parallel
            else " ".join(parts)
        )
        if self.pp > 1:
            chunks = f" x{self.chunks_per_stage}" if self.chunks_per_stage else ""
            text += f" ({self.schedule}{chunks})"
        if self.ulysses > 1:
            text += f" ulysses{self.ulysses}"
        if self.zero:
            text += f" zero{self.zero}" + (f"/{self.shard}" if self.shard else "")
        return text.strip() or "one process"


def _problems(layout: Layout) -> Iterator[str]:
    for name in ("dp", "tp", "pp", "cp", "ep", "ulysses"):
        if getattr(layout, name) < 1:
            yield f"layout.{name} must be 1 or more, got {getattr(layout, name)}"
            return
    if layout.data_ranks % layout.ep:
        yield (
            f"layout.ep {layout.ep} does not divide dp × cp = {layout.data_ranks}, over which experts are spread; "
            f"{nearest_divisor(layout.data_ranks, layout.ep)} would"
        )
    if layout.cp % layout.ulysses:
        near = nearest_divisor(layout.cp, layout.ulysses)
        yield f"layout.ulysses {layout.ulysses} does not divide cp {layout.cp}; {near} would"
    if layout.shard is not None and (layout.shard < 1 or layout.dp % layout.shard):
        near = nearest_divisor(layout.dp, layout.shard)
        yield f"layout.shard {layout.shard} does not divide dp {layout.dp}; {near} would"
    if layout.shard is not None and not layout.zero:
        yield "layout.shard says how far ZeRO shares; set layout.zero to 1, 2 or 3, or leave it out"
    if layout.zero not in (0, 1, 2, 3):
        yield f"layout.zero is 0, 1, 2 or 3, got {layout.zero}"
    if layout.sequence_parallel and layout.tp == 1:
        yield "layout.sequence_parallel splits tokens over tensor-parallel ranks: it needs tp of 2 or more"


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


def stage_placement(layout: Layout) -> StagePlacement:
    return family(layout.schedule).placement if layout.pp > 1 else StagePlacement.LOOP


def chunks_per_stage(layout: Layout) -> int:
    """Chunks whose weights a stage holds."""
    if layout.pp == 1:
        return 1
    return layout.chunks_per_stage or family(layout.schedule).chunks_per_stage


def pipeline_chunks(layout: Layout) -> int:
    """Chunks a micro-batch passes."""
    return stage_placement(layout).chunks(layout.pp, chunks_per_stage(layout))


def splits_backward(layout: Layout) -> bool:
    """Whether the pipeline computes gradients of weights apart from those of inputs."""
    return layout.pp > 1 and family(layout.schedule).splits_backward


@lru_cache(maxsize=1024)
def held_chunks(layout: Layout, stage: int) -> tuple[tuple[int, int], ...]:
    """(chunk, direction) pairs that a stage holds; direction 1 is the second copy of a bidirectional pipeline."""
    return stage_placement(layout).held_by(stage, layout.pp, chunks_per_stage(layout))


@lru_cache(maxsize=4096)
def split_layers(layers: int, chunks: int, head_layers: float | None = None) -> tuple[int, ...]:
    """Layers of each chunk, as even as can be: those left over go to the chunks right before the last.

    `head_layers`: how many layers the head takes as long as; the last chunk, which has it, gets fewer of them.
    """
    if chunks == 1:
        return (layers,)
    last = layers // chunks
    if head_layers is not None:
        last = max(1, round((layers + head_layers) / chunks - head_layers))
    each, more = divmod(layers - last, chunks - 1)
    longer = range(more) if head_layers is not None else range(chunks - 1 - more, chunks - 1)
    return (*(each + (chunk in longer) for chunk in range(chunks - 1)), last)
