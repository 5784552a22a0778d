"""Held and Part: what a rank has of a tensor, and the rectangles of it that are stored. Made by the trainer, taken
by everything here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cumulo.checkpoint.decide.share import share
from cumulo.layout.box import Box, whole_box


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
    """Of a run in one process."""
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
