"""GGUF weights into a decoder: quantised matrices stay quantised, exactly as the file has them, or everything
becomes plain numbers. Called by `load_model`.

One parameter is filled at a time, straight from the mapped file, so at no moment are there two copies of
more than one parameter in memory.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.kernels.cpu.affine_blocks import AffineBlocks
from cumulo.kernels.cpu.packed_linear import PackedWeight
from cumulo.models.decoder import Decoder
from cumulo.models.files.gguf_blocks import affine_blocks, float_array, is_quantised
from cumulo.models.files.gguf_file import GGUFFile, GGUFTensor
from cumulo.models.files.names_gguf import ignorable, placements, row_order
from cumulo.models.files.placement import Placement, check_tensors
from cumulo.spec.model import ModelSpec

Progress = Callable[[int, int], None]  # bytes of the file that are in place, bytes in all


def load_gguf(
    file: GGUFFile,
    decoder: Decoder,
    spec: ModelSpec,
    keep_quantised: bool = True,
    progress: Progress | None = None,
) -> None:
    """Fill every parameter of `decoder`. A file that lacks one, has another or has one of a wrong shape is
    refused before anything is loaded, with all names.

    `keep_quantised`: matrices whose parts are all quantised become packed weights; otherwise they are
    dequantised into the decoder's own dtype.
    """
    wanted = placements(spec, file.tensors)
    check_tensors(
        str(file.path),
        wanted,
        {name: tensor.shape for name, tensor in file.tensors.items()},
        lambda name: ignorable(name, file.tensors),
    )
    parts_of: dict[str, list[Placement]] = defaultdict(list)
    for placement in wanted:
        parts_of[placement.target].append(placement)
    parameters = dict(decoder.named_parameters())
    total = sum(file.tensors[placement.source].nbytes for placement in wanted)
    done = 0
    for target, parts in parts_of.items():
        tensors = [file.tensors[placement.source] for placement in parts]
        orders = [row_order(file.architecture, spec, placement.source) for placement in parts]
        if keep_quantised and decoder.can_pack(target) and all(map(is_quantised, tensors)):
            blocks = [_ordered(affine_blocks(t), order) for t, order in zip(tensors, orders, strict=True)]
            if parameters[target].ndim == 3:
                decoder.pack(target, _pack_experts(parts, blocks, parameters[target].shape[0]))
            else:
                decoder.pack(target, PackedWeight.pack(_in_row_order(parts, blocks)))
        else:
            for placement, tensor, order in zip(parts, tensors, orders, strict=True):
                placement.fill(parameters[target].data, _plain(tensor, order))
        done += sum(tensor.nbytes for tensor in tensors)
        if progress is not None:
            progress(done, total)
    if unfilled := [name for name in parameters if name not in parts_of]:
        raise ModelError(
            f"{file.path}: the decoder wants {', '.join(unfilled)}, which GGUF files have no name for"
        )


def _ordered(blocks: AffineBlocks, order: np.ndarray | None) -> AffineBlocks:
    return blocks if order is None else blocks.take_rows(order)


def _plain(tensor: GGUFTensor, order: np.ndarray | None) -> Tensor:
    values = float_array(tensor)
    if order is not None:
        values = values[order]
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _in_row_order(parts: Sequence[Placement], blocks: Sequence[AffineBlocks]) -> list[AffineBlocks]:
    first_rows = [placement.box[-2].start for placement in parts]
    return [blocks[index] for index in np.argsort(first_rows)]


def _pack_experts(
    parts: Sequence[Placement], blocks: Sequence[AffineBlocks], experts: int
) -> list[PackedWeight]:
    """One packed matrix per expert, from stacked tensors or from one tensor per expert and part."""
    of_expert: list[list[tuple[int, AffineBlocks]]] = [[] for _ in range(experts)]
    for placement, block in zip(parts, blocks, strict=True):
        expert_range, row_range, _ = placement.box
        rows = row_range.stop - row_range.start
        for index, expert in enumerate(range(expert_range.start, expert_range.stop)):
            piece = block.take_rows(slice(index * rows, (index + 1) * rows))
            of_expert[expert].append((row_range.start, piece))
    return [
        PackedWeight.pack([piece for _, piece in sorted(pieces, key=lambda item: item[0])])
        for pieces in of_expert
    ]
