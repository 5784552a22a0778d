"""GgufWeights: the tensors of a GGUF file, checked against the spec of its model. Opened by `open_weights`, read by
`fill_decoder` and `ParameterReader`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.kernels.cpu.affine_blocks import AffineBlocks
from cumulo.kernels.cpu.packed_linear import PackedWeight
from cumulo.models.files.gguf_blocks import affine_blocks, float_array, held_bytes, is_quantised
from cumulo.models.files.gguf_file import GGUFFile, GGUFTensor
from cumulo.models.files.names_gguf import ignorable, placements, row_order
from cumulo.models.files.placement import PlacedPart, Placement, check_tensors
from cumulo.models.text.tokenizer import Tokenizer
from cumulo.models.text.tokenizer_gguf import tokenizer_from_gguf
from cumulo.spec.model import ModelSpec

# What GGUF calls the fields of a generation config.
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


class GgufWeights:
    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        """A file that lacks a tensor, has another or has one of a wrong shape is refused, with all names."""
        self.file, self.path, self.spec = file, file.path, spec
        self.placements = placements(spec, file.tensors)
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        check_tensors(str(file.path), self.placements, shapes, lambda name: ignorable(name, file.tensors))
        used = [file.tensors[one.source] for one in self.placements]
        quantised = [tensor for tensor in used if is_quantised(tensor)]
        self.quantised_parameters = sum(tensor.rows * tensor.columns for tensor in quantised)
        self.quantised_bytes = sum(map(held_bytes, quantised))
        self.tensor_types: Mapping[str, int] = Counter(tensor.type_name for tensor in used)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self.file.metadata)

    def recommended_sampling(self) -> dict[str, Any]:
        """By the names of a generation config."""
        metadata = self.file.metadata
        return {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}

    # -- as a WeightSource -----------------------------------------------------------------------------
    def nbytes(self, placement: Placement) -> int:
        return self.file.tensors[placement.source].nbytes

    def is_quantised(self, placement: Placement) -> bool:
        return is_quantised(self.file.tensors[placement.source])

    def plain(self, part: PlacedPart) -> Tensor:
        tensor, slices = self.file.tensors[part.source], part.stored_slices
        if len(tensor.shape) == 1:
            order, values = self._order(part), float_array(tensor)
            values = (values if order is None else values[order])[slices]
        else:
            values = float_array(self._rows(part))[..., slices[-1]]
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def matrices(self, part: PlacedPart) -> list[AffineBlocks]:
        tensor, columns = self.file.tensors[part.source], part.stored_slices[-1]
        blocks = affine_blocks(self._rows(part))
        if columns.stop - columns.start != tensor.columns:
            if columns.start % blocks.group or columns.stop % blocks.group:
                cut = columns.start if columns.start % blocks.group else columns.stop
                raise ModelError(
                    f"{tensor.name} is stored as {tensor.type_name} in blocks of {blocks.group} columns, which "
                    f"cannot be cut at column {cut} of {tensor.columns}; use a smaller tp, pp instead of tp, or "
                    "keep_quantised=False"
                )
            blocks = blocks.take_columns(columns)
        rows = part.target_slices[-2].stop - part.target_slices[-2].start
        return [blocks.take_rows(slice(first, first + rows)) for first in range(0, len(blocks.codes), rows)]

    def pack(self, matrices: Sequence[AffineBlocks]) -> PackedWeight:
        return PackedWeight.pack(matrices)

    def _order(self, part: PlacedPart) -> np.ndarray | None:
        return row_order(self.file.architecture, self.spec, part.source)

    def _rows(self, part: PlacedPart) -> GGUFTensor:
        """The rows that a part has of its tensor; a view of the file where that is possible."""
        tensor, order, slices = self.file.tensors[part.source], self._order(part), part.stored_slices
        raw = tensor.raw.reshape(*tensor.shape[:-1], -1)
        raw = raw[slices[:-1]] if order is None else raw[order[slices[0]]]
        return replace(tensor, shape=(*raw.shape[:-1], tensor.columns), raw=raw.reshape(-1, raw.shape[-1]))
