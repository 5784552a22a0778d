"""Placement: which tensor of a model file fills which part of which decoder parameter. Made by the naming
tables (`names_huggingface`, `names_gguf`), carried out by the two weight loaders.

The decoder fuses what files keep apart (query, key and value; gate and up; all experts of a layer), so a
file tensor is a *box* inside a parameter: it starts at `offset` and is as large as the tensor itself.
Boxes are data: a loader can check them before it reads a byte, and cut them when a model is split.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from cumulo.errors import ModelError
from cumulo.layout.pieces import Box
from cumulo.layout.serving import HeldParameter

NAMES_SHOWN = 20  # an error lists this many tensor names of each kind, then counts the rest


@dataclass(frozen=True, slots=True)
class Placement:
    """File tensor `source`, of exactly `shape` (outermost dimension first), goes to a box of `target`.

    Examples: the key projection goes to rows from 512 of the fused qkv: `offset=(512, 0)`. Expert 3's up
    projection [F, H] goes to a stacked parameter [E, 2F, H]: `offset=(3, F, 0)`, where the offset's extra
    leading number picks one index. All experts' up projections in one tensor [E, F, H]: `offset=(0, F, 0)`.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    offset: tuple[int, ...] = ()  # empty: the beginning, in every dimension
    view: tuple[int, ...] | None = None  # the parameter is seen in this shape before the box is cut out
    transposed: bool = False  # the source's last two dimensions are swapped first

    @property
    def box(self) -> tuple[slice, ...]:
        """The part of the (viewed) parameter that is filled, one slice per dimension."""
        shape = self.placed_shape
        starts = self.offset or (0,) * len(shape)
        sizes = (1,) * (len(starts) - len(shape)) + shape
        return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))

    @property
    def placed_shape(self) -> tuple[int, ...]:
        """The source's shape after `transposed`."""
        if not self.transposed:
            return self.shape
        return (*self.shape[:-2], self.shape[-1], self.shape[-2])

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def region(self, parameter: Tensor) -> Tensor:
        """A view of the part of `parameter` that this placement fills, in the source's (placed) shape."""
        seen = parameter if self.view is None else parameter.view(self.view)
        return (
            seen[self.box].view(self.placed_shape) if len(self.offset) > len(self.shape) else seen[self.box]
        )


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """The part of a placement that a rank holds: slices of the source (as placed) go to slices of its parameter."""

    placement: Placement
    target: str  # in the rank's decoder
    source_slices: tuple[slice, ...]
    target_slices: tuple[slice, ...]
    view: tuple[int, ...] | None  # the rank's parameter is seen in this shape first

    @property
    def source(self) -> str:
        return self.placement.source

    @property
    def stored_slices(self) -> tuple[slice, ...]:
        """The slices of the tensor as the file has it."""
        if not self.placement.transposed:
            return self.source_slices
        return (*self.source_slices[:-2], self.source_slices[-1], self.source_slices[-2])

    @property
    def elements(self) -> int:
        return math.prod(part.stop - part.start for part in self.source_slices)

    @property
    def is_whole(self) -> bool:
        return self.elements == self.placement.elements

    def fill(self, parameter: Tensor, stored: Tensor) -> None:
        """Copy the stored slices into place."""
        seen = parameter if self.view is None else parameter.view(self.view)
        found = stored.transpose(-1, -2) if self.placement.transposed else stored
        region = seen[self.target_slices]
        region.copy_(found.reshape(region.shape))


def placed_parts(
    placements: Iterable[Placement], held: Mapping[str, HeldParameter] | None
) -> list[PlacedPart]:
    """What is read of every tensor: all of it or, by a rank, the boxes it holds, cut with those tensors fill."""
    if held is None:
        return [
            PlacedPart(one, one.target, tuple(slice(0, size) for size in one.placed_shape), one.box, one.view)
            for one in placements
        ]
    by_source = {parameter.source: (name, parameter) for name, parameter in held.items()}
    found = []
    for placement in placements:
        if placement.target in by_source:
            name, parameter = by_source[placement.target]
            for box in parameter.boxes:
                if (part := _cut(placement, name, parameter, box)) is not None:
                    found.append(part)
    return found


def _cut(placement: Placement, name: str, held: HeldParameter, box: Box) -> PlacedPart | None:
    view, offset, size, at = None, box.offset, box.size, box.at
    if placement.view is not None:
        # Rows are seen as heads of `inner` rows each; boxes are cut between heads.
        inner = placement.view[1]
        view = (held.shape[0] // inner, *placement.view[1:])
        offset, at = (offset[0] // inner, 0, *offset[1:]), (at[0] // inner, 0, *at[1:])
        size = (size[0] // inner, inner, *size[1:])
    filled = placement.box
    source, target = [], []
    for part, begin, length, into in zip(filled, offset, size, at, strict=True):
        first, last = max(part.start, begin), min(part.stop, begin + length)
        if first >= last:
            return None
        source.append(slice(first - part.start, last - part.start))
        target.append(slice(into + first - begin, into + last - begin))
    # A leading index of the box that the source does not have, such as which expert it is.
    source = source[len(filled) - len(placement.shape) :]
    return PlacedPart(placement, name, tuple(source), tuple(target), view)


def check_tensors(
    where: str,
    placements: Iterable[Placement],
    found: Mapping[str, tuple[int, ...]],
    ignorable: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raise one ModelError that names every missing, extra and misshapen tensor of the file(s) `where`.

    `found` maps the tensor names in the file to their shapes, outermost dimension first.
    """
    wanted = {placement.source: placement.shape for placement in placements}
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted and not ignorable(name)]
    misshapen = [
        f"{name} is {list(found[name])}, should be {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != shape
    ]
    if not (missing or extra or misshapen):
        return
    lines = [f"{where} does not hold the weights its configuration describes:"]
    for kind, names in (("missing", missing), ("unexpected", extra), ("misshapen", misshapen)):
        if names:
            shown = "; ".join(names[:NAMES_SHOWN])
            rest = f"; and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            lines.append(f"  {kind} ({len(names)}): {shown}{rest}")
    lines.append("Check that configuration and weights are of the same model and completely downloaded.")
    raise ModelError("\n".join(lines))
