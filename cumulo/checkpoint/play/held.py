"""Held and Part: what a rank has of a tensor, and the rectangles of it that are stored. Made by the trainer, taken
by everything here."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cumulo.layout.pieces import Box, cut_rows, whole_box

LEAST_BYTES = 1 << 20  # of a box that is worth cutting: below, more pieces cost more than an uneven share


def share(name: str, boxes: Sequence[Box], holders: Sequence[int], rank: int, item_bytes: int) -> list[Box]:
    """The boxes, or rows of them, that `rank` stores; over all holders they are `boxes`, each element once."""
    place, count = list(holders).index(rank), len(holders)
    found: list[Box] = []
    for box in boxes:
        large = bool(box.size) and box.size[0] >= count and math.prod(box.size) * item_bytes >= LEAST_BYTES
        if count > 1 and large:
            first, rows = box.at[0], box.size[0]
            begin, end = first + rows * place // count, first + rows * (place + 1) // count
            found += [_moved(part, begin) for part in cut_rows([box], begin, end)]
        elif zlib.crc32(f"{name}{box.offset}".encode()) % count == place:
            found.append(box)
    return found


def _moved(box: Box, rows: int) -> Box:
    """`cut_rows` counts from the first row it keeps; the tensor is still the whole one."""
    return Box(box.offset, box.size, (box.at[0] + rows, *box.at[1:]))


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A live tensor that is all or some of a whole one."""

    tensor: Tensor
    whole: tuple[int, ...]  # shape of the whole tensor
    boxes: tuple[Box, ...]  # of it, where they lie in `tensor`
    holders: tuple[int, ...]  # the ranks that have the same


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One rectangle of a whole tensor; `tensor` is a view of the live one, or a copy of it."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


def held_whole(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Everything that a run in one process holds."""
    return {
        name: Held(tensor.detach(), tuple(tensor.shape), (whole_box(tensor.shape),), (0,))
        for name, tensor in tensors.items()
    }


def parts_of(name: str, held: Held, boxes: Sequence[Box]) -> list[Part]:
    return [Part(name, held.whole, box.offset, held.tensor[box.held_slices]) for box in boxes]


def all_parts(state: Mapping[str, Held]) -> list[Part]:
    """Everything that is held: what loading overwrites."""
    return [part for name, held in state.items() for part in parts_of(name, held, held.boxes)]


def own_parts(state: Mapping[str, Held], rank: int) -> list[Part]:
    """What falls to this rank when a state is stored once, however many hold it."""
    return [
        part
        for name, held in state.items()
        for part in parts_of(
            name, held, share(name, held.boxes, held.holders, rank, held.tensor.element_size())
        )
    ]
