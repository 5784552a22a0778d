"""fill_decoder: weights from a model's files into a decoder, whatever their format. Called by `load_model`.

One parameter is filled at a time, straight from the mapped files, so at no moment are there two copies of more than
one parameter in memory. Quantised matrices stay quantised, exactly as the files have them, or are dequantised into
the decoder's own type where its kernels need that.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from cumulo.kernels.packed import Packed
from cumulo.layout.serving import HeldParameter
from cumulo.models.decoder import Decoder
from cumulo.models.files.placement import PlacedPart, Placement, placed_parts

Progress = Callable[[int, int], None]  # bytes of the files that are in place, bytes in all


class WeightSource(Protocol):
    """The tensors of a model's files, checked against its spec: `GgufWeights` or `FolderWeights`."""

    placements: list[Placement]

    def nbytes(self, placement: Placement) -> int:
        """What the placement's tensors take in the files."""
        ...

    def is_quantised(self, placement: Placement) -> bool: ...

    def plain(self, part: PlacedPart) -> Tensor:
        """The stored numbers of a part, dequantised if need be."""
        ...

    def matrices(self, part: PlacedPart) -> list[Any]:
        """A quantised part as the file has it; of stacked experts one matrix for each."""
        ...

    def pack(self, matrices: Sequence[Any]) -> Packed:
        """Matrices stacked along the rows, in the form of the CPU's kernels."""
        ...


def fill_decoder(
    decoder: Decoder,
    source: WeightSource,
    keep_quantised: bool = True,
    progress: Progress | None = None,
    held: Mapping[str, HeldParameter] | None = None,
) -> None:
    """Fill every parameter of `decoder`; one on the meta device is given its memory here.

    `keep_quantised`: matrices whose parts are all quantised become packed weights. `held`: a rank's parameters, of
    which only its own parts are read; the source is the whole model's.
    """
    parameters = dict(decoder.named_parameters())
    parts_of: dict[str, list[PlacedPart]] = defaultdict(list)
    for part in placed_parts(source.placements, held):
        parts_of[part.target].append(part)

    def file_bytes(parts: Sequence[PlacedPart]) -> int:
        return sum(source.nbytes(one.placement) * one.elements // one.placement.elements for one in parts)

    total, done = sum(map(file_bytes, parts_of.values())), 0
    with torch.no_grad():
        for target, parts in parts_of.items():
            quantised = all(source.is_quantised(part.placement) for part in parts)
            if keep_quantised and quantised and decoder.can_pack(target):
                decoder.pack(target, _packed(source, parts, parameters[target].ndim == 3))
            else:
                parameter = parameters[target]
                plain = decoder.allocate(target) if parameter.is_meta else parameter
                for part in parts:
                    part.fill(plain, source.plain(part))
            done += file_bytes(parts)
            if progress is not None:
                progress(done, total)
    for name, parameter in parameters.items():
        if name not in parts_of and parameter.is_meta:  # a rank has nothing of it
            decoder.allocate(name)


def _packed(source: WeightSource, parts: Sequence[PlacedPart], stacked: bool) -> Packed | list[Packed]:
    """One packed matrix or, of `stacked` experts, one for each."""
    pieces: dict[int, list[tuple[int, Any]]] = defaultdict(list)
    for part in parts:
        first = part.target_slices[0].start if stacked else 0
        for expert, matrix in enumerate(source.matrices(part), first):
            pieces[expert].append((part.target_slices[-2].start, matrix))
    by_row = [sorted(found, key=itemgetter(0)) for _, found in sorted(pieces.items())]
    packed = [source.pack([matrix for _, matrix in found]) for found in by_row]
    return packed if stacked else packed[0]
