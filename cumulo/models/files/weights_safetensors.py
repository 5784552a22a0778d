"""Weights from a Hugging Face folder, plain or quantised (AWQ, GPTQ, compressed-tensors, fp8), into a decoder.
Called by `load_model`.

Headers of all files are checked first, against the spec, so that a damaged or wrong model is refused before a byte
of weights is touched. Then one matrix at a time goes from the memory map to its place: no second copy of the model
ever exists. Quantised matrices stay as the file has them (`Packed`), or are dequantised into the decoder's own type
where its kernels need that.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.kernels.cpu.packed_float8 import PackedFloat8
from cumulo.kernels.cpu.packed_linear import PackedStack, PackedWeight, have_one_order
from cumulo.kernels.packed import Packed
from cumulo.layout.serving import HeldParameter
from cumulo.models.decoder import Decoder
from cumulo.models.files import names_huggingface
from cumulo.models.files.placement import PlacedPart, Placement, check_tensors, placed_parts
from cumulo.models.files.quantised import awq, compressed_tensors, gptq
from cumulo.models.files.quantised.matrices import Float8Matrix, IntegerMatrix, QuantisedMatrix, StoredTensor
from cumulo.models.files.safetensors_file import FileTensor, FolderTensors, check_types, read_directory
from cumulo.spec.model import ModelSpec
from cumulo.spec.quantisation import Quantisation

Progress = Callable[[int, int], None]  # bytes done, bytes in all
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
        how = self.how
        try:
            if how.format == "awq":
                return awq.read(tensors, rows)
            if how.format == "gptq":
                return gptq.read(tensors, rows, columns, how.bits, how.stores_zero_minus_one)
            return compressed_tensors.read(tensors, rows, columns, how)
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
        wanted = _stored_tensors(*placement.shape, how)
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


def _stored_tensors(rows: int, columns: int, how: Quantisation) -> list[StoredTensor]:
    if how.format == "awq":
        return awq.stored_tensors(rows, columns, how.group)
    if how.format == "gptq":
        return gptq.stored_tensors(rows, columns, how.bits, how.group, how.act_order)
    return compressed_tensors.stored_tensors(rows, columns, how)


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


@dataclass(frozen=True, slots=True)
class CheckedFolder:
    """Where every tensor is, and which matrices are quantised."""

    tensors: Mapping[str, FileTensor]
    placements: list[Placement]
    matrices: Mapping[str, StoredMatrix]  # by the source of their placement; of a plain folder none
    # Biases that some GPTQ writers add to matrices without one; they must be zero.
    empty_biases: tuple[str, ...] = ()

    @property
    def packed(self) -> list[StoredMatrix]:
        """The parameters that stay quantised in memory: parts of a parameter of which all parts are."""
        plain = {one.target for one in self.placements if one.source not in self.matrices}
        return [
            matrix
            for matrix in self.matrices.values()
            if matrix.placement.target not in plain and not matrix.placement.target.endswith(_NEVER_PACKED)
        ]

    @property
    def packed_bytes(self) -> int:
        """What they take in memory; scales are kept in two bytes where that loses nothing."""
        return sum(map(_held_bytes, self.packed))

    def sources(self, placement: Placement) -> list[str]:
        """The tensors that a placement is read from."""
        stored = self.matrices.get(placement.source)
        return [placement.source] if stored is None else stored.sources


def check_folder(folder: Path, spec: ModelSpec, how: Quantisation | None) -> CheckedFolder:
    """Read headers only; a folder that is incomplete or not what its configuration says is refused."""
    tensors = read_directory(folder)
    if spec.layers > len(tensors):
        raise ModelError(
            f"{folder}: config.json says {spec.layers:,} layers, but there are only {len(tensors)} tensors"
        )
    placements = names_huggingface.placements(spec)
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    try:
        matrices = {} if how is None else stored_matrices(how, placements, found)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    if how is not None and not matrices:
        raise ModelError(f"{folder}: config.json says the weights are {how.in_words}, but none of them are")
    wanted = {placement.source for placement in placements}
    biases = tuple(
        name
        for matrix in matrices.values()
        if (name := f"{matrix.module}.bias") in tensors and name not in wanted
    )
    own = {name for matrix in matrices.values() for name in matrix.sources}.union(biases)
    ignorable = names_huggingface.ignorable(spec)
    plain = [one for one in placements if one.source not in matrices]
    check_tensors(
        str(folder),
        plain,
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name: name in own or ignorable(name) or (how is not None and _ignorable_note(name)),
    )
    check_types(folder, [one.source for one in plain], tensors)
    return CheckedFolder(tensors, placements, matrices, biases)


def _ignorable_note(name: str) -> bool:
    """What writers leave behind that changes no weight: scales of KV caches and outputs."""
    return name.endswith((".k_scale", ".v_scale", ".output_scale", ".q_scale"))


def load_safetensors(
    folder: Path,
    decoder: Decoder,
    spec: ModelSpec,
    progress: Progress | None = None,
    held: Mapping[str, HeldParameter] | None = None,
    how: Quantisation | None = None,
    keep_quantised: bool = True,
) -> None:
    """Fill every parameter of `decoder` from the folder's model.safetensors, or its shards. `held`: a rank's
    parameters, of which only its own parts are read; `spec` is the whole model's. `how`: what config.json says of
    quantised weights."""
    checked = check_folder(folder, spec, how)
    parameters = dict(decoder.named_parameters())
    if any(parameter.is_meta for parameter in parameters.values()):
        raise ValueError(
            "the decoder is on the meta device; give it memory first: decoder.to_empty(device=...)"
        )
    parts_of: dict[str, list[PlacedPart]] = defaultdict(list)
    for part in placed_parts(checked.placements, held):
        parts_of[part.target].append(part)
    total = sum(_file_bytes(checked, part) for parts in parts_of.values() for part in parts)
    done = 0
    with FolderTensors(checked.tensors) as files, torch.no_grad():
        for name in checked.empty_biases:
            if bool(files.read(name).any()):
                raise ModelError(f"{folder}: {name} is not zero, but {spec.family} has no such bias")
        for target, parts in parts_of.items():
            quantised = [part.source in checked.matrices for part in parts]
            if keep_quantised and all(quantised) and decoder.can_pack(target):
                matrices = [_matrix(files, checked, part) for part in parts]
                assert how is not None
                decoder.pack(target, _packed(parts, matrices, parameters[target], how))
            else:
                for part in parts:
                    part.fill(parameters[target], _plain(files, checked, part))
            done += sum(_file_bytes(checked, part) for part in parts)
            if progress is not None:
                progress(done, total)


def _matrix(files: FolderTensors, checked: CheckedFolder, part: PlacedPart) -> QuantisedMatrix:
    stored = checked.matrices[part.source]
    names = zip(stored.tensors, stored.sources, strict=True)
    matrix = stored.read({tensor.name: files.read(name) for tensor, name in names})
    _refuse_nonsense(stored.module, matrix)
    try:
        return matrix if part.is_whole else matrix.sliced(*part.stored_slices)
    except ModelError as error:
        raise ModelError(f"{stored.module}: {error}") from error


def _plain(files: FolderTensors, checked: CheckedFolder, part: PlacedPart) -> Tensor:
    if part.source in checked.matrices:
        return _matrix(files, checked, part).dequantise()
    return files.read(part.source, None if part.is_whole else part.stored_slices)


def _refuse_nonsense(module: str, matrix: QuantisedMatrix) -> None:
    damaged = not bool(matrix.scale.isfinite().all())
    if isinstance(matrix, Float8Matrix):
        damaged |= bool(((matrix.codes.view(torch.uint8) & 0x7F) == 0x7F).any())
    if damaged:
        raise ModelError(f"{module} contains NaN or infinite numbers; the file is damaged, download it again")


def _packed(
    parts: Sequence[PlacedPart], matrices: Sequence[QuantisedMatrix], parameter: Tensor, how: Quantisation
) -> Packed | list[Packed]:
    bits = 8 if how.activation_bits == 8 else 16
    placed = sorted(
        ((*(one.start for one in part.target_slices[:-1]), index) for index, part in enumerate(parts))
    )  # by expert, where there are several, then by row
    if parameter.ndim == 2:
        return pack_rows([matrices[place[-1]] for place in placed], bits)
    experts: dict[int, list[QuantisedMatrix]] = defaultdict(list)
    for expert, _, index in placed:
        experts[expert].append(matrices[index])
    return [pack_rows(experts[expert], bits) for expert in sorted(experts)]


def pack_rows(matrices: Sequence[QuantisedMatrix], activation_bits: int = 16) -> Packed:
    """Matrices stacked along the rows, in the form of the CPU's kernels."""
    if all(isinstance(matrix, IntegerMatrix) for matrix in matrices):
        blocks = [matrix.affine_blocks() for matrix in matrices if isinstance(matrix, IntegerMatrix)]
        if have_one_order(blocks):
            return PackedWeight.pack(blocks, activation_bits)
        return PackedStack([PackedWeight.pack(one, activation_bits) for one in blocks])
    floats = [matrix for matrix in matrices if isinstance(matrix, Float8Matrix)]
    return PackedFloat8.stacked([(one.codes, one.row_scales(), one.block[1]) for one in floats])


def _file_bytes(checked: CheckedFolder, part: PlacedPart) -> int:
    whole = sum(checked.tensors[name].nbytes for name in checked.sources(part.placement))
    return whole * part.elements // part.placement.elements


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
