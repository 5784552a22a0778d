"""How one engine is spread over ranks, and what each of them holds: the smaller model it builds, and the boxes
of the whole parameters that fill it. The engine, its loader and the memory ledger ask. Pure arithmetic.

    layout = ServingLayout(tp=2, pp=2)
    rank_part(spec, layout, rank=3).layers          # of the first stage

The mesh is `arange(world).reshape(pp, dp, tp)`, its stages counted from the last one: rank 0, which is the engine's
own process, is in the last stage. It draws the tokens, so that no result of a step ever travels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from cumulo.errors import ConfigError, require_least
from cumulo.layout.check import tensor_sliced
from cumulo.layout.layout import split_layers
from cumulo.layout.pieces import Box, slice_in_parts, tp_cut, whole_box
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class ServingPlace:
    """Where a rank stands in the mesh."""

    stage: int  # 0 embeds the tokens
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ServingLayout:
    tp: int = 1  # tensor parallel: heads, feed-forward width and vocabulary in this many slices
    pp: int = 1  # pipeline parallel: layers in this many stages
    dp: int = 1  # data-parallel attention: each sequence's keys and values on one of this many ranks
    ep: int = 1  # expert parallel: experts whole, spread over all tp × dp ranks of a stage; 1: cut by width

    def __post_init__(self) -> None:
        require_least(self, 1, "tp", "pp", "dp", "ep")
        if self.ep not in (1, self.stage_ranks):
            raise ConfigError(
                f"ep {self.ep} was asked for, but experts are spread over all tp × dp = {self.stage_ranks} ranks "
                f"of a stage, or each is cut over tp (ep 1); use ep {self.stage_ranks}, or change tp or dp"
            )

    @property
    def world(self) -> int:
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        return self.dp * self.tp

    def place(self, rank: int) -> ServingPlace:
        rest, tp = divmod(rank, self.tp)
        from_last, dp = divmod(rest, self.dp)
        return ServingPlace(self.pp - 1 - from_last, dp, tp)

    def rank(self, place: ServingPlace) -> int:
        return ((self.pp - 1 - place.stage) * self.dp + place.dp) * self.tp + place.tp

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """The ranks among which heads and width are cut, in the order of their slices."""
        at = self.place(rank)
        return tuple(self.rank(replace(at, tp=tp)) for tp in range(self.tp))

    def data_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same slice and other sequences' keys and values."""
        at = self.place(rank)
        return tuple(self.rank(replace(at, dp=dp)) for dp in range(self.dp))

    def stage_group(self, rank: int) -> tuple[int, ...]:
        """All ranks of the stage."""
        first = rank // self.stage_ranks * self.stage_ranks
        return tuple(range(first, first + self.stage_ranks))

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of the other stages that compute the same slice of the same sequences, by stage."""
        at = self.place(rank)
        return tuple(self.rank(replace(at, stage=stage)) for stage in range(self.pp))

    def __str__(self) -> str:
        sizes = (f"{name} {size}" for name in ("tp", "pp", "dp", "ep") if (size := getattr(self, name)) > 1)
        return ", ".join(sizes) or "one rank"


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank of a layout holds and computes."""

    layout: ServingLayout
    rank: int
    place: ServingPlace
    whole: ModelSpec
    local: ModelSpec  # sizes of this rank's decoder; its router still knows all experts
    layers: range  # of the whole model
    vocabulary: range  # the tokens whose rows of the embedding and of the head it has
    experts: range  # the routed experts it has

    @property
    def first(self) -> bool:
        return self.place.stage == 0

    @property
    def last(self) -> bool:
        return self.place.stage == self.layout.pp - 1

    @property
    def carries_stream(self) -> bool:
        """Exactly one of the ranks that sum up adds what they have in common: the stream so far and the biases."""
        return self.place.tp == 0

    @property
    def has_embedding(self) -> bool:
        return self.first or (self.last and self.whole.tied_embeddings)

    @property
    def has_head(self) -> bool:
        return self.last and not self.whole.tied_embeddings


def rank_part(spec: ModelSpec, layout: ServingLayout, rank: int) -> RankPart:
    """The part of a rank in a layout that `serving_problems` has nothing against."""
    at = layout.place(rank)
    ends = list(accumulate(split_layers(spec.layers, layout.pp), initial=0))
    layers = range(ends[at.stage], ends[at.stage + 1])
    vocabulary = even_run(spec.vocab_size, at.tp, layout.tp)
    moe, experts = spec.moe, range(0)
    if moe is not None:
        experts = range(moe.experts)
        width = moe.expert_hidden // layout.tp
        if layout.ep > 1:
            index = layout.stage_group(rank).index(rank)
            experts, width = even_run(moe.experts, index, layout.ep), moe.expert_hidden
        moe = replace(
            moe,
            expert_hidden=width,
            shared_hidden=moe.shared_hidden // layout.tp,
            dense_layers=_among(moe.dense_layers, layers),
        )
    local = replace(
        spec,
        layers=len(layers),
        heads=spec.heads // layout.tp,
        kv_heads=max(1, spec.kv_heads // layout.tp),
        ffn_hidden=spec.ffn_hidden // layout.tp,
        vocab_size=len(vocabulary),
        windowed_layers=None if spec.windowed_layers is None else _among(spec.windowed_layers, layers),
        moe=moe,
    )
    return RankPart(layout, rank, at, spec, local, layers, vocabulary, experts)


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter of a rank's decoder, and where it lies in the whole model's."""

    source: str  # its name in the whole model
    whole: tuple[int, ...]  # its shape there
    boxes: tuple[Box, ...]  # that are held, of the whole parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is held: boxes lie side by side along the dimension that was cut."""
        return tuple(max(box.at[dim] + box.size[dim] for box in self.boxes) for dim in range(len(self.whole)))

    @property
    def elements(self) -> int:
        return sum(math.prod(box.size) for box in self.boxes)


def held_parameters(part: RankPart) -> dict[str, HeldParameter]:
    """Everything a rank holds, by the name in its own decoder, whose layers count from 0."""
    held: dict[str, HeldParameter] = {}
    for name, shape in parameter_shapes(part.whole).items():
        own = _own_name(part, name)
        if own is not None:
            held[own] = HeldParameter(name, shape, tuple(_boxes(part, name, shape)))
    return held


def _own_name(part: RankPart, name: str) -> str | None:
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"layers.{int(layer) - part.layers.start}.{rest}" if int(layer) in part.layers else None
    if name == "embed.weight":
        return name if part.has_embedding else None
    return name if part.last else None


def _boxes(part: RankPart, name: str, shape: tuple[int, ...]) -> list[Box]:
    whole, tp, index = whole_box(shape), part.layout.tp, part.place.tp
    if name in ("embed.weight", "head.weight"):
        rows = part.vocabulary
        return [replace(whole, offset=(rows.start, 0), size=(len(rows), shape[1]))]
    if ".experts." in name and part.layout.ep > 1:
        held = part.experts
        return [replace(whole, offset=(held.start, 0, 0), size=(len(held), *shape[1:]))]
    cut = tp_cut(part.whole, name, shape)
    if cut is None or tp == 1:
        return [whole]
    if name.endswith(("attention.qkv.weight", "attention.qkv.bias")) and part.whole.kv_heads < tp:
        return _query_and_shared_head(part, whole)
    return slice_in_parts([whole], *cut, index, tp)


def _query_and_shared_head(part: RankPart, whole: Box) -> list[Box]:
    """More ranks than key/value heads: several ranks hold the same head, each for its own query heads."""
    spec, tp, index = part.whole, part.layout.tp, part.place.tp
    head, width, rest = spec.head_dim, spec.heads // tp * spec.head_dim, whole.size[1:]
    beyond = (0,) * len(rest)
    shared = index * spec.kv_heads // tp * head
    keys = spec.heads * head
    values = keys + spec.kv_heads * head
    return [
        Box((index * width, *beyond), (width, *rest), (0, *beyond)),
        Box((keys + shared, *beyond), (head, *rest), (width, *beyond)),
        Box((values + shared, *beyond), (head, *rest), (width + head, *beyond)),
    ]


def serving_problems(
    spec: ModelSpec, layout: ServingLayout, available: int, unit: str = "CPU cores"
) -> Iterator[str]:
    """Why this model cannot be served so, and what would work. `available`: how many ranks there is a place for."""
    if layout.world > available:
        yield (
            f"{layout} takes {layout.world} ranks, and this machine has {available} {unit}; use at most "
            f"{available} rank{'s' if available > 1 else ''}"
        )
    if uneven_parts := _uneven_parts(spec, layout, layout.tp):
        works = [str(tp) for tp in range(1, spec.heads + 1) if not _uneven_parts(spec, layout, tp)]
        yield f"tp {layout.tp} cannot share {' and '.join(uneven_parts)} evenly; tp {' or '.join(works)} can"
    if layout.pp > spec.layers:
        yield f"pp {layout.pp} cannot share {spec.layers} layers; use pp {spec.layers} or fewer"
    if layout.ep > 1 and spec.moe is None:
        yield f"ep {layout.ep} spreads experts, and this model has none; omit ep"
    elif layout.ep > 1 and spec.moe is not None and layout.ep > spec.moe.experts:
        yield f"ep {layout.ep} cannot spread {spec.moe.experts} experts; use ep {spec.moe.experts} or fewer"


def _uneven_parts(spec: ModelSpec, layout: ServingLayout, tp: int) -> list[str]:
    """What so many tensor-parallel ranks could not share."""
    sliced = tensor_sliced(spec)
    kv_heads = sliced.pop("key/value heads", None)
    if layout.ep > 1:  # experts are whole
        sliced.pop("columns of an expert", None)
    found = [f"{count:,} {what}" for what, count in sliced.items() if count % tp]
    if kv_heads is not None and kv_heads % tp and tp % kv_heads:  # more ranks than heads hold copies of them
        found.append(f"{kv_heads} key/value heads")
    return found


def even_run(count: int, index: int, runs: int) -> range:
    """Run `index` of `runs` as even ones of `count` things."""
    return range(count * index // runs, count * (index + 1) // runs)


def _among(chosen: tuple[int, ...], layers: range) -> tuple[int, ...]:
    """Those of the layers, counted from the first of these."""
    return tuple(layer - layers.start for layer in chosen if layer in layers)
