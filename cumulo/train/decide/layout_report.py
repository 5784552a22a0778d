"""The rank mesh of a configuration as text: who stands where, holds what and works with whom. Pure; for
`cumulo train --explain-layout`."""

import math
from collections.abc import Iterator

from cumulo.layout.layout import Axis, Layout, held_chunks
from cumulo.layout.pieces import chunk_parts, pieces, zero_rows
from cumulo.pipeline.decide.catalog import family
from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import TrainConfig

_SHOWN_RANKS = 32
_SHOWN_GROUPS = 8

_MEANINGS: dict[Axis, str] = {
    "tp": "slice every matrix",
    "cp": "have pieces of the same sequences",
    "ulysses": "exchange heads",
    "ring": "pass keys and values around a ring",
    "dp": "have different samples",
    "ep": "have different experts",
    "pp": "have different layers",
    "shard": "shard weights, gradients or optimizer state (ZeRO)",
    "copies": "have the same shards",
}


def explain_layout(config: TrainConfig, spec: ModelSpec | None) -> str:
    """`spec`: None where the model is not known yet."""
    return "\n".join(_lines(config, spec))


def _lines(config: TrainConfig, spec: ModelSpec | None) -> Iterator[str]:
    layout = config.layout
    yield f"layout {layout}: {layout.world} rank{'s' * (layout.world > 1)}"
    sizes = f"pp {layout.pp}, dp {layout.dp}, cp {layout.cp}, tp {layout.tp}"
    yield f"the mesh is arange({layout.world}).reshape({sizes})"
    yield ""
    yield from _ranks(layout, spec)
    yield ""
    yield from _groups(layout)
    yield from _batch(config)


def _ranks(layout: Layout, spec: ModelSpec | None) -> Iterator[str]:
    yield "  rank   pp  dp  cp  tp" + (
        "   layers        parameters: used, updated by this rank" if spec else ""
    )
    for rank in range(min(layout.world, _SHOWN_RANKS)):
        at = layout.place(rank)
        line = f"{rank:6d} {at.pp:4d} {at.dp:3d} {at.cp:3d} {at.tp:3d}"
        if spec is not None:
            held, moved = _elements(layout, spec, rank)
            line += f"   {_layers(layout, spec, at.pp):12s}  {held:,}, {moved:,}"
        yield line
    if layout.world > _SHOWN_RANKS:
        yield f"   ... and {layout.world - _SHOWN_RANKS:,} more"


def _layers(layout: Layout, spec: ModelSpec, stage: int) -> str:
    parts = chunk_parts(spec, layout)
    found = []
    for chunk, direction in held_chunks(layout, stage):
        layers = parts[chunk].layers
        found.append(f"{layers.start}–{layers.stop - 1}" + ("'" if direction else ""))
    return ", ".join(found)


def _elements(layout: Layout, spec: ModelSpec, rank: int) -> tuple[int, int]:
    held = moved = 0
    for piece in pieces(spec, layout, rank).values():
        members = layout.group(piece.zero_axis, rank)
        begin, end = 0, piece.shape[0]
        if layout.zero:
            begin, end = zero_rows(end, len(members), members.index(rank))
        held += math.prod(piece.shape)
        moved += (end - begin) * math.prod(piece.shape[1:])
    return held, moved


def _groups(layout: Layout) -> Iterator[str]:
    for axis, meaning in _MEANINGS.items():
        groups = layout.groups(axis)
        if len(groups[0]) == 1 or (axis in ("shard", "copies") and not layout.zero):
            continue
        if axis in ("ulysses", "ring") and layout.ulysses == 1:
            continue
        shown = " ".join(f"({' '.join(map(str, group))})" for group in groups[:_SHOWN_GROUPS])
        more = f" ... {len(groups)} groups" if len(groups) > _SHOWN_GROUPS else ""
        yield f"  {axis:8s} {meaning}: {shown}{more}"


def _batch(config: TrainConfig) -> Iterator[str]:
    layout = config.layout
    each = config.batch_sequences // layout.dp
    micro_batches = each // config.micro_batch
    yield ""
    yield (
        f"a step has {config.batch_sequences} sequences of {config.data.sequence_length}: {each} for each "
        f"data-parallel rank, in {micro_batches} micro-batch{'es' * (micro_batches > 1)} of {config.micro_batch}"
    )
    if layout.pp > 1:
        chosen = family(layout.schedule)
        yield (
            f"pipeline {chosen.name} ({chosen.title}): bubble {chosen.formula.text}, see "
            f"cumulo schedule {chosen.name} --stages {layout.pp} --micro-batches {micro_batches}"
        )
