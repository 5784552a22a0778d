"""Box: a rectangle of a whole tensor, and where it lies in the part somebody holds. Layouts cut parameters into
boxes; checkpoints store boxes, so that any other layout finds what it needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


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
