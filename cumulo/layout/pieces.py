"""Pieces: which part of which parameter each rank of a layout holds, as data. Pure arithmetic.

Models are built from it, gradients are summed by it, norms count by it, and checkpoints are written and read by it.

    pieces(spec, Layout(tp=2), rank=1)["embed.weight"].boxes   # the second half of the vocabulary
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from cumulo.base.nearest import did_you_mean
from cumulo.errors import ConfigError
from cumulo.layout.check import layers_problem
from cumulo.layout.layout import Axis, Layout, held_chunks, pipeline_chunks, split_layers
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import ModelSpec

# Matrices of a layer whose adapters are served, and of how many of a file's matrices each is made.
SERVED_SECTIONS = {
    "qkv": 3, "output": 1, "gate_up": 2, "down": 1, "q": 1, "q_a": 1, "q_b": 1, "kv_a": 1,
}  # fmt: skip
_RANK_STEP = 16  # a tile of the kernels


def padded_rank(rank: int) -> int:
    """What adapters of this rank take room for."""
    return -(-rank // _RANK_STEP) * _RANK_STEP


def served_elements(spec: ModelSpec, rank: int) -> int:
    """Numbers that the room for one adapter of up to this rank has, in a model or in a rank's part of one."""
    total = 0
    for name, shape in parameter_shapes(spec).items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if name.startswith("layers.") and name.endswith(".weight") and kind in SERVED_SECTIONS:
            outputs, inputs = shape
            total += padded_rank(rank) * (SERVED_SECTIONS[kind] * inputs + outputs)
    return total


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of a low-rank adapter's two."""
    return name.endswith((".lora_a", ".lora_b"))


def adapter_shapes(spec: ModelSpec, rank: int, targets: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Of the parameters that adapters add to a whole model, by name. Targets that it has not are refused."""
    found: dict[str, tuple[int, ...]] = {}
    kinds: set[str] = set()
    for name, shape in parameter_shapes(spec).items():
        module, _, last = name.rpartition(".")
        kind = module.rpartition(".")[2]
        if not name.startswith("layers.") or last != "weight" or len(shape) != 2 or kind == "router":
            continue
        kinds.add(kind)
        if kind in targets:
            outputs, inputs = shape
            found |= {f"{module}.lora_a": (rank, inputs), f"{module}.lora_b": (outputs, rank)}
    for target in targets:
        if target not in kinds:
            hint = did_you_mean(target, sorted(kinds), quoted=True)
            raise ConfigError(f"lora.targets: this model has no projection {target!r}{hint}")
    return found


@dataclass(frozen=True, slots=True)
class Box:
    offset: tuple[int, ...]  # in the whole tensor
    size: tuple[int, ...]
    at: tuple[int, ...]  # in the tensor that is held

    @property
    def whole_slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.size, strict=True))

    @property
    def held_slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.at, self.size, strict=True))


def whole_box(shape: Sequence[int]) -> Box:
    nowhere = (0,) * len(shape)
    return Box(nowhere, tuple(shape), nowhere)


def slice_in_parts(boxes: Sequence[Box], dim: int, parts: Sequence[int], index: int, count: int) -> list[Box]:
    """Slice `index` of `count` of a dimension that is made of parts, each of which is sliced: a fused query, key
    and value give every slice some of each. `boxes` are still whole along `dim`."""
    found: list[Box] = []
    for box in boxes:
        begin = held = 0
        for part in parts:
            size = part // count
            found.append(
                replace(
                    box,
                    offset=_with(box.offset, dim, begin + index * size),
                    size=_with(box.size, dim, size),
                    at=_with(box.at, dim, held),
                )
            )
            begin, held = begin + part, held + size
    return found


def cut_rows(boxes: Sequence[Box], begin: int, end: int) -> tuple[Box, ...]:
    """What lies in rows [begin, end) of the held tensor, held as those rows only."""
    found: list[Box] = []
    for box in boxes:
        first, last = max(begin, box.at[0]), min(end, box.at[0] + box.size[0])
        if first < last:
            found.append(
                Box(
                    _with(box.offset, 0, box.offset[0] + first - box.at[0]),
                    _with(box.size, 0, last - first),
                    _with(box.at, 0, first - begin),
                )
            )
    return tuple(found)


def _with(numbers: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*numbers[:index], value, *numbers[index + 1 :])


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """What a pipeline chunk holds of the model."""

    index: int
    layers: range
    first: bool  # it embeds the tokens
    last: bool  # it has the final norm, the head and the loss

    def holds(self, name: str, tied: bool) -> bool:
        if name.startswith("layers."):
            return int(name.split(".")[1]) in self.layers
        if name == "embed.weight":
            return self.first or (self.last and tied)
        return self.last


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of a parameter, before ZeRO."""

    name: str
    whole: tuple[int, ...]  # shape of the parameter
    shape: tuple[int, ...]  # of the part
    boxes: tuple[Box, ...]
    expert: bool  # spread over `ep`: its gradient is summed over `expert_data`, not over `data`
    sliced: bool  # over tp: every tensor-parallel rank has another part
    partial_over_tp: bool  # every tensor-parallel rank has the same part, and a part of its gradient
    holders: tuple[int, ...]  # the ranks that hold the same, this one included

    @property
    def data_axis(self) -> Axis:
        """The ranks with other tokens: over them a gradient is summed first."""
        return "expert_data" if self.expert else "data"

    @property
    def zero_axis(self) -> Axis:
        """The ranks that share the parameter out under ZeRO: `Layout.zero_ranks` and `expert_zero_ranks` are how
        many."""
        return "expert_data" if self.expert else "shard"

    def cut_rows(self, begin: int, end: int) -> tuple[Box, ...]:
        """The boxes of rows [begin, end) of this part."""
        return cut_rows(self.boxes, begin, end)


# Rows of a whole parameter that are sliced each for itself, and the dimension that is sliced; by the name's end.
_COLUMNS = ("attention.output.weight", "down.weight")
_INSIDE = ("q_a.weight", "q_a.bias", "q_a_norm.weight", "kv_a.weight", "kv_a.bias", "kv_a_norm.weight",
           "q_norm.weight", "k_norm.weight")  # fmt: skip


def chunk_parts(spec: ModelSpec, layout: Layout) -> tuple[ChunkPart, ...]:
    """The model cut into the chunks of the layout's pipeline."""
    if problem := layers_problem(spec.layers, layout):
        raise ConfigError(problem)
    count = pipeline_chunks(layout)
    ends = list(accumulate(split_layers(spec.layers, count), initial=0))
    return tuple(
        ChunkPart(index, range(*layers), index == 0, index == count - 1)
        for index, layers in enumerate(pairwise(ends))
    )


def pieces(
    spec: ModelSpec, layout: Layout, rank: int, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Piece]:
    """Everything a rank holds, by the parameter's name. A stage with two copies of one chunk has it once.
    `shapes`: of whole parameters, where the model has others than its spec says, such as adapters."""
    at = layout.place(rank)
    parts = chunk_parts(spec, layout)
    own = [parts[chunk] for chunk, _ in held_chunks(layout, at.pp)]
    return {
        name: piece_of(spec, layout, rank, name, shape)
        for name, shape in (parameter_shapes(spec) if shapes is None else shapes).items()
        if any(part.holds(name, spec.tied_embeddings) for part in own)
    }


def zero_rows(rows: int, ranks: int, index: int) -> tuple[int, int]:
    """The rows of a part that ZeRO gives to one of `ranks`: runs of ⌈rows/ranks⌉, the last ones short or empty, as
    FSDP2 cuts them."""
    size = math.ceil(rows / ranks)
    return min(index * size, rows), min((index + 1) * size, rows)


def piece_of(spec: ModelSpec, layout: Layout, rank: int, name: str, shape: tuple[int, ...]) -> Piece:
    """A rank's part of one parameter, of which it holds some."""
    at = layout.place(rank)
    expert = ".experts." in name
    boxes: list[Box] = [whole_box(shape)]
    cut = tp_cut(spec, name, shape)
    if cut is not None and layout.tp > 1:
        boxes = slice_in_parts(boxes, *cut, at.tp, layout.tp)
    if expert and layout.ep > 1:
        index = layout.group("ep", rank).index(rank)
        boxes = slice_in_parts(boxes, 0, (shape[0],), index, layout.ep)
    held = list(shape)
    if cut is not None:
        held[cut[0]] //= layout.tp
    if expert:
        held[0] //= layout.ep
    return Piece(
        name,
        shape,
        tuple(held),
        tuple(boxes),
        expert,
        cut is not None,
        layout.tp > 1
        and cut is None
        and (layout.sequence_parallel or name.endswith(_INSIDE) or is_adapter(name)),
        tuple(sorted(_holders(spec, layout, rank, name, expert, cut is not None))),
    )


def tp_cut(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """(dimension, its parts) along which tensor parallelism slices a parameter; None: it is whole everywhere."""
    if is_adapter(name):  # B has the rows of the matrix that it adapts, A its columns
        module, _, last = name.rpartition(".")
        cut = tp_cut(spec, f"{module}.weight", shape)
        return cut if cut is not None and cut[0] == (1 if last == "lora_a" else 0) else None
    if name in ("embed.weight", "head.weight"):
        return 0, (shape[0],)
    if name.endswith(("attention.qkv.weight", "attention.qkv.bias")):
        query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        return 0, (query, key, key)
    if name.endswith(("attention.q.weight", "attention.q_b.weight", "attention.kv_b.weight")):
        return 0, (shape[0],)
    if name.endswith(("gate_up.weight", "gate_up.bias")):
        return 0, (shape[0] // 2, shape[0] // 2)
    if name.endswith(_COLUMNS):
        return 1, (shape[1],)
    if name.endswith("experts.gate_up"):
        return 1, (shape[1] // 2, shape[1] // 2)
    if name.endswith("experts.down"):
        return 2, (shape[2],)
    return None


def _holders(
    spec: ModelSpec, layout: Layout, rank: int, name: str, expert: bool, sliced: bool
) -> Iterator[int]:
    """Same stage or a stage that holds a copy; same slice; same experts."""
    at = layout.place(rank)
    parts = chunk_parts(spec, layout)
    stages = [
        stage
        for stage in range(layout.pp)
        if any(parts[chunk].holds(name, spec.tied_embeddings) for chunk, _ in held_chunks(layout, stage))
    ]
    own_experts = (at.dp * layout.cp + at.cp) % layout.ep
    for other in range(layout.world):
        place = layout.place(other)
        if place.pp not in stages or (sliced and place.tp != at.tp):
            continue
        if expert and (place.dp * layout.cp + place.cp) % layout.ep != own_experts:
            continue
        yield other
