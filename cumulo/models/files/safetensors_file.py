"""The safetensors files of a Hugging Face folder: their headers, checked against the files' sizes. Used by
whoever reads weights from such a folder.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cumulo.errors import ModelError
from cumulo.models.files.json_file import read_json, shown

INDEX_NAME = "model.safetensors.index.json"
_MOST_DIMENSIONS = 8
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
               "U16": 2}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileTensor:
    """What a header says about one tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 1)


def read_directory(folder: Path) -> dict[str, FileTensor]:
    """Every tensor of the folder's safetensors files, by name, from their headers alone."""
    tensors: dict[str, FileTensor] = {}
    weight_map = _weight_map(folder)
    for file in _files(folder, weight_map):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ModelError(f"{file} contains {name!r}, which is also in {tensors[name].file.name}")
            tensors[name] = tensor
    for name, file_name in (weight_map or {}).items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise ModelError(f"{folder / INDEX_NAME} says {name!r} is in {file_name}, but it is not there")
    return tensors


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name from the index of a sharded model; None when there is no index."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return None
    try:
        weight_map = read_json(index).get("weight_map")
    except ModelError as error:
        raise ModelError(f"{index} is not a valid safetensors index: {error}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is not a valid safetensors index: its weight_map is empty or not a table")
    for name in weight_map.values():
        # An index is downloaded data: it must not make us read files outside the model's folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names the file {shown(name)}, which is not a plain file name")
    return weight_map


def _files(folder: Path, weight_map: dict[str, str] | None) -> list[Path]:
    if weight_map is not None:
        files = [folder / name for name in sorted(set(weight_map.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ModelError(f"{folder} lacks {names}, which {INDEX_NAME} names")
        return files
    files = sorted(folder.glob("*.safetensors"))
    single = folder / "model.safetensors"
    if single in files or len(files) == 1:
        return [single] if single in files else files
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise ModelError(f"{folder} contains several weight files ({names}) but no {INDEX_NAME} to join them")
    old = " (only older .bin files: convert them to safetensors)" if list(folder.glob("*.bin")) else ""
    raise ModelError(f"{folder} contains no .safetensors file{old}")


def read_header(file: Path) -> dict[str, FileTensor]:
    """The tensors one file says it holds; the library checks that they fill the file, side by side."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            found = {
                name: FileTensor(file, one.get_dtype(), tuple(one.get_shape()))
                for name, one in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or cut short ({str(error)[:200]}); download it again") from error
    for name, tensor in found.items():
        if len(tensor.shape) > _MOST_DIMENSIONS:
            raise ModelError(f"{file} is damaged: {shown(name)} has {len(tensor.shape):,} dimensions")
    return found
