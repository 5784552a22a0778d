"""GGUF weights into a decoder: quantised matrices stay quantised, exactly as the file has them, or everything
becomes plain numbers. Called by `load_model`.

One parameter is filled at a time, straight from the mapped file, so at no moment are there two copies of
more than one parameter in memory.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.kernels.cpu.affine_blocks import AffineBlocks
from cumulo.kernels.cpu.packed_linear import PackedWeight
from cumulo.layout.serving import HeldParameter
from cumulo.models.decoder import Decoder
from cumulo.models.files.gguf_blocks import affine_blocks, float_array, is_quantised
from cumulo.models.files.gguf_file import GGUFFile, GGUFTensor
from cumulo.models.files.names_gguf import ignorable, placements, row_order
from cumulo.models.files.placement import PlacedPart, check_tensors, placed_parts
from cumulo.spec.model import ModelSpec

Progress = Callable[[int, int], None]  # bytes of the file that are in place, bytes in all


def load_gguf(
    file: GGUFFile,
    decoder: Decoder,
    spec: ModelSpec,
    keep_quantised: bool = True,
    progress: Progress | None = None,
    held: Mapping[str, HeldParameter] | None = None,
) -> None:
    """Fill every parameter of `decoder`; one on the meta device is given its memory here. A file that lacks one,
    has another or has one of a wrong shape is refused before anything is loaded, with all names.

    `keep_quantised`: matrices whose parts are all quantised become packed weights; otherwise they are
    dequantised into the decoder's own dtype. `held`: a rank's parameters, of which only its own parts are read;
    `spec` is the whole model's.
    """
    wanted = placements(spec, file.tensors)
    check_tensors(
        str(file.path),
        wanted,
        {name: tensor.shape for name, tensor in file.tensors.items()},
        lambda name: ignorable(name, file.tensors),
    )
    parts_of: dict[str, list[PlacedPart]] = defaultdict(list)
    for part in placed_parts(wanted, held):
        parts_of[part.target].append(part)
    parameters = dict(decoder.named_parameters())
    total = sum(file.tensors[part.source].nbytes for parts in parts_of.values() for part in parts)
    done = 0
    for target, parts in parts_of.items():
        tensors = [file.tensors[part.source] for part in parts]
        orders = [row_order(file.architecture, spec, part.source) for part in parts]
        if keep_quantised and decoder.can_pack(target) and all(map(is_quantised, tensors)):
            blocks = [
                _blocks(tensor, order, part)
                for tensor, order, part in zip(tensors, orders, parts, strict=True)
            ]
            if parameters[target].ndim == 3:
                decoder.pack(target, _pack_experts(parts, blocks, parameters[target].shape[0]))
            else:
                decoder.pack(target, PackedWeight.pack(_in_row_order(parts, blocks)))
        else:
            plain = decoder.allocate(target) if parameters[target].is_meta else parameters[target]
            for part, tensor, order in zip(parts, tensors, orders, strict=True):
                part.fill(plain.data, plain_part(tensor, order, part))
        done += sum(tensor.nbytes for tensor in tensors)
        if progress is not None:
            progress(done, total)
    unnamed = [name for name in parameters if name not in parts_of]
    if unfilled := [name for name in unnamed if parameters[name].numel()]:
        raise ModelError(
            f"{file.path}: the decoder wants {', '.join(unfilled)}, which GGUF files have no name for"
        )
    for name in unnamed:
        if parameters[name].is_meta:
            decoder.allocate(name)


def _cut_rows(tensor: GGUFTensor, order: np.ndarray | None, slices: tuple[slice, ...]) -> GGUFTensor:
    """The tensor's rows at `slices`, all but the last of which count; a view of the file where that is possible."""
    raw = tensor.raw.reshape(*tensor.shape[:-1], -1)
    raw = raw[slices[:-1]] if order is None else raw[order[slices[0]]]
    return replace(tensor, shape=(*raw.shape[:-1], tensor.columns), raw=raw.reshape(-1, raw.shape[-1]))


def _blocks(tensor: GGUFTensor, order: np.ndarray | None, part: PlacedPart) -> AffineBlocks:
    slices = part.stored_slices
    blocks = affine_blocks(_cut_rows(tensor, order, slices))
    columns = slices[-1]
    if columns.stop - columns.start == tensor.columns:
        return blocks
    if columns.start % blocks.group or columns.stop % blocks.group:
        raise ModelError(
            f"{tensor.name} is stored as {tensor.type_name} in blocks of {blocks.group} columns, which cannot be "
            f"cut at column {columns.start if columns.start % blocks.group else columns.stop} of {tensor.columns}; "
            "use a smaller tp, pp instead of tp, or keep_quantised=False"
        )
    return blocks.take_columns(columns)


def plain_part(tensor: GGUFTensor, order: np.ndarray | None, part: PlacedPart) -> Tensor:
    slices = part.stored_slices
    if len(tensor.shape) == 1:
        values = float_array(tensor)
        values = (values if order is None else values[order])[slices]
    else:
        values = float_array(_cut_rows(tensor, order, slices))[..., slices[-1]]
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _in_row_order(parts: Sequence[PlacedPart], blocks: Sequence[AffineBlocks]) -> list[AffineBlocks]:
    first_rows = [part.target_slices[-2].start for part in parts]
    return [blocks[index] for index in np.argsort(first_rows)]


def _pack_experts(
    parts: Sequence[PlacedPart], blocks: Sequence[AffineBlocks], experts: int
) -> list[PackedWeight]:
    """One packed matrix per expert, from stacked tensors or from one tensor per expert and part."""
    of_expert: list[list[tuple[int, AffineBlocks]]] = [[] for _ in range(experts)]
    for part, block in zip(parts, blocks, strict=True):
        expert_range, row_range, _ = part.target_slices
        rows = row_range.stop - row_range.start
        for index, expert in enumerate(range(expert_range.start, expert_range.stop)):
            piece = block.take_rows(slice(index * rows, (index + 1) * rows))
            of_expert[expert].append((row_range.start, piece))
    return [
        PackedWeight.pack([piece for _, piece in sorted(pieces, key=lambda item: item[0])])
        for pieces in of_expert
    ]
