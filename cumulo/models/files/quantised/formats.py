"""From a folder's quantisation to its matrices: which tensors each has, and how they are read. Called by the
loader.

Whether a matrix is quantised, its tensors say: writers leave some out (the head, a router), and their lists of what
was left out are patterns in several dialects.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from cumulo.errors import ModelError
from cumulo.models.files.placement import Placement
from cumulo.models.files.quantised import awq, compressed_tensors, gptq
from cumulo.models.files.quantised.matrices import QuantisedMatrix
from cumulo.models.files.quantised.stored import StoredTensor
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
