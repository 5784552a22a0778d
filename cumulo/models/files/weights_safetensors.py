"""FolderWeights: the tensors of a Hugging Face folder, plain or quantised (AWQ, GPTQ, compressed-tensors, fp8).
Opened by `open_weights`, read by `fill_decoder` and `ParameterReader`.

Headers of all files are checked first, against the spec, so that a damaged or wrong model is refused before a byte
of weights is touched.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.kernels.cpu.packed_float8 import PackedFloat8
from cumulo.kernels.cpu.packed_linear import PackedStack, PackedWeight, have_one_order
from cumulo.kernels.packed import Packed
from cumulo.models.files import names_huggingface
from cumulo.models.files.json_file import read_json
from cumulo.models.files.placement import PlacedPart, Placement, check_tensors
from cumulo.models.files.quantised import awq, compressed_tensors, gptq
from cumulo.models.files.quantised.matrices import (
    FLOATS,
    Float8Matrix,
    IntegerMatrix,
    QuantisedMatrix,
    StoredTensor,
)
from cumulo.models.files.safetensors_file import read_directory
from cumulo.models.text.tokenizer import Tokenizer, load_tokenizer
from cumulo.spec.model import ModelSpec
from cumulo.spec.quantisation import Quantisation

# The tensor whose presence says that a module is quantised.
_SIGNS = {
    "awq": ("qweight",),
    "gptq": ("qweight",),
    "pack-quantized": ("weight_packed",),
    "int-quantized": ("weight_scale",),
    "float-quantized": ("weight_scale",),
    "fp8": ("weight_scale_inv", "weight_scale"),
}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One quantised matrix of a folder, in place of the placement's own source."""

    placement: Placement
    how: Quantisation
    tensors: tuple[StoredTensor, ...]  # those that are there

    @property
    def module(self) -> str:
        return self.placement.source.removesuffix(".weight")

    @property
    def sources(self) -> list[str]:
        return [f"{self.module}.{tensor.name}" for tensor in self.tensors]

    def read(self, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
        """From the tensors under their short names."""
        rows, columns = self.placement.shape
        try:
            if self.how.format == "awq":
                return awq.read(tensors, rows, columns, self.how)
            if self.how.format == "gptq":
                return gptq.read(tensors, rows, columns, self.how)
            return compressed_tensors.read(tensors, rows, columns, self.how)
        except (ValueError, ModelError) as error:
            raise ModelError(f"{self.module}: {error}") from error


def stored_matrices(
    how: Quantisation, placements: list[Placement], found: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, StoredMatrix]:
    """The quantised matrices among `placements`, by source; `found` says type and shape of every tensor. A
    tensor of a wrong type or shape is refused."""
    result: dict[str, StoredMatrix] = {}
    for placement in placements:
        module = placement.source.removesuffix(".weight")
        if module == placement.source or len(placement.shape) != 2:
            continue
        if not any(f"{module}.{sign}" in found for sign in _SIGNS[how.format]):
            continue
        _check_sizes(module, placement.shape, how)
        format_of = {"awq": awq.stored_tensors, "gptq": gptq.stored_tensors}
        wanted = format_of.get(how.format, compressed_tensors.stored_tensors)(*placement.shape, how)
        present = []
        for tensor in wanted:
            name = f"{module}.{tensor.name}"
            if name not in found:
                if tensor.required:
                    raise ModelError(f"{name} is missing, although {module} is quantized as {how.in_words}")
                continue
            dtype, shape = found[name]
            if dtype not in tensor.dtypes or shape not in tensor.shapes:
                expected = " or ".join(str(list(one)) for one in tensor.shapes)
                raise ModelError(
                    f"{name} is {dtype} {list(shape)}; {how.in_words} of {list(placement.shape)} needs "
                    f"{' or '.join(tensor.dtypes)} {expected}"
                )
            present.append(tensor)
        result[placement.source] = StoredMatrix(placement, how, tuple(present))
    return result


def _check_sizes(module: str, shape: tuple[int, ...], how: Quantisation) -> None:
    rows, columns = shape
    if how.scheme == "group" and how.group and columns % how.group:
        raise ModelError(f"{module} has rows of {columns} weights, which groups of {how.group} do not divide")
    per_word = 32 // how.bits
    words_of = {"awq": rows, "gptq": columns if columns % per_word else rows}.get(how.format, 0)
    if words_of % per_word:
        raise ModelError(
            f"{module} is {rows} x {columns}; the {how.format} format needs sizes that are multiples of {per_word}"
        )


_NEVER_PACKED = "attention.kv_b.weight"


class FolderWeights:
    def __init__(self, folder: Path, spec: ModelSpec, how: Quantisation | None = None) -> None:
        """Reads headers only; a folder that is incomplete or not what its configuration says is refused. `how`:
        what config.json says of quantised weights."""
        self.path, self.spec, self.how = folder, spec, how
        self.tensors = tensors = read_directory(folder)
        self._open: dict[Path, Any] = {}
        if spec.layers > len(tensors):
            raise ModelError(
                f"{folder}: config.json says {spec.layers:,} layers, but there are only {len(tensors)} tensors"
            )
        self.placements = names_huggingface.placements(spec)
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        try:  # the quantised matrices, by the source of their placement
            self.stored = {} if how is None else stored_matrices(how, self.placements, found)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error
        if how is not None and not self.stored:
            raise ModelError(
                f"{folder}: config.json says the weights are {how.in_words}, but none of them are"
            )
        wanted = {placement.source for placement in self.placements}
        # Biases that some GPTQ writers add to matrices without one; they must be zero.
        self._empty_biases = {
            name
            for matrix in self.stored.values()
            if (name := f"{matrix.module}.bias") in tensors and name not in wanted
        }
        own = {name for matrix in self.stored.values() for name in matrix.sources} | self._empty_biases
        ignorable = names_huggingface.ignorable(spec)
        plain = [one for one in self.placements if one.source not in self.stored]
        check_tensors(
            str(folder),
            plain,
            {name: tensor.shape for name, tensor in tensors.items()},
            lambda name: name in own or ignorable(name) or (how is not None and _ignorable_note(name)),
        )
        names = [one.source for one in plain]
        odd = [f"{name} is {tensors[name].dtype}" for name in names if tensors[name].dtype not in FLOATS]
        if odd:
            raise ModelError(
                f"{folder} contains weights of an unsupported type: {'; '.join(odd[:10])}"
                f"{f'; and {len(odd) - 10} more' if len(odd) > 10 else ''}; known: {', '.join(FLOATS)}"
            )

    @property
    def _packable(self) -> list[StoredMatrix]:
        """The matrices that can stay quantised in memory: parts of a parameter of which all parts are."""
        plain = {one.target for one in self.placements if one.source not in self.stored}
        return [
            matrix
            for matrix in self.stored.values()
            if matrix.placement.target not in plain and not matrix.placement.target.endswith(_NEVER_PACKED)
        ]

    @property
    def quantised_parameters(self) -> int:
        return sum(matrix.placement.elements for matrix in self._packable)

    @property
    def quantised_bytes(self) -> int:
        """What these take in memory; scales are kept in two bytes where that loses nothing."""
        return sum(map(_held_bytes, self._packable))

    @property
    def tensor_types(self) -> Mapping[str, int]:
        plain = (one.source for one in self.placements if one.source not in self.stored)
        types = Counter(self.tensors[name].dtype for name in plain)
        return types if self.how is None else {self.how.in_words: len(self.stored), **types}

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)

    def recommended_sampling(self) -> dict[str, Any]:
        return read_json(self.path / "generation_config.json")

    # -- as a WeightSource -----------------------------------------------------------------------------
    def nbytes(self, placement: Placement) -> int:
        stored = self.stored.get(placement.source)
        names = [placement.source] if stored is None else stored.sources
        return sum(self.tensors[name].nbytes for name in names)

    def is_quantised(self, placement: Placement) -> bool:
        return placement.source in self.stored

    def plain(self, part: PlacedPart) -> Tensor:
        if part.source in self.stored:
            return self.matrices(part)[0].dequantise()
        return self._read(part.source, None if part.is_whole else part.stored_slices)

    def _read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor, or the part of it at these slices. Files are mapped when first needed."""
        file = self.tensors[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt", device="cpu")
            handle = self._open[file]
            found: Tensor = handle.get_tensor(name) if part is None else handle.get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
        return found

    def matrices(self, part: PlacedPart) -> list[QuantisedMatrix]:
        stored = self.stored[part.source]
        names = zip(stored.tensors, stored.sources, strict=True)
        matrix = stored.read({tensor.name: self._read(name) for tensor, name in names})
        _refuse_nonsense(stored.module, matrix)
        bias = f"{stored.module}.bias"
        if bias in self._empty_biases and bool(self._read(bias).any()):
            raise ModelError(f"{self.path}: {bias} is not zero, but {self.spec.family} has no such bias")
        try:
            return [matrix if part.is_whole else matrix.sliced(*part.stored_slices)]
        except ModelError as error:
            raise ModelError(f"{stored.module}: {error}") from error

    def pack(self, matrices: Sequence[QuantisedMatrix]) -> Packed:
        activation_bits = 8 if self.how is not None and self.how.activation_bits == 8 else 16
        if all(isinstance(matrix, IntegerMatrix) for matrix in matrices):
            blocks = [matrix.affine_blocks() for matrix in matrices if isinstance(matrix, IntegerMatrix)]
            if have_one_order(blocks):
                return PackedWeight.pack(blocks, activation_bits)
            return PackedStack([PackedWeight.pack(one, activation_bits) for one in blocks])
        floats = [matrix for matrix in matrices if isinstance(matrix, Float8Matrix)]
        return PackedFloat8.stacked([(one.codes, one.row_scales(), one.block[1]) for one in floats])


def _ignorable_note(name: str) -> bool:
    """What writers leave behind that changes no weight: scales of KV caches and outputs."""
    return name.endswith((".k_scale", ".v_scale", ".output_scale", ".q_scale"))


def _refuse_nonsense(module: str, matrix: QuantisedMatrix) -> None:
    damaged = not bool(matrix.scale.isfinite().all())
    if isinstance(matrix, Float8Matrix):
        damaged |= bool(((matrix.codes.view(torch.uint8) & 0x7F) == 0x7F).any())
    if damaged:
        raise ModelError(f"{module} contains NaN or infinite numbers; the file is damaged, download it again")


def _held_bytes(matrix: StoredMatrix) -> int:
    rows, columns = matrix.placement.shape
    how = matrix.how
    stored = {tensor.name for tensor in matrix.tensors}
    if how.format in ("fp8", "float-quantized"):
        width = how.block[1] if how.block else columns
        return rows * columns + 4 * rows * -(-columns // width)
    groups = columns // how.group if how.group else 1
    wide = how.bits > 4
    asymmetric = not how.symmetric and ("qzeros" in stored or "weight_zero_point" in stored)
    numbers = 2 if asymmetric or not wide else 1
    return math.ceil(rows * (columns * (8 if wide else 4) / 8 + groups * numbers * (4 if asymmetric else 2)))
