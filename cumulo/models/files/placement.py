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

    def fill(self, parameter: Tensor, source: Tensor) -> None:
        """Copy `source` into place, converting its type on the way; nothing model-sized is allocated."""
        self.region(parameter).copy_(source.transpose(-1, -2) if self.transposed else source)


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
