"""The safetensors files of a Hugging Face folder: their headers, checked against the files' sizes, and their
tensors. Used by whoever reads weights from such a folder.
"""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.models.files.json_file import read_json, shown

INDEX_NAME = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000  # as in the format's own library
_MOST_DIMENSIONS = 8
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # types that weights may have
# name of a type -> bits, for types that may lie in a file beside the weights
_OTHER_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileTensor:
    """What a header says about one tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class FolderTensors(ExitStack):
    """Reads a folder's tensors. Files are mapped when first needed; their pages belong to the system's cache."""

    def __init__(self, tensors: Mapping[str, FileTensor]) -> None:
        super().__init__()
        self._tensors, self._open = tensors, dict[Path, Any]()

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor, or the part of it at these slices."""
        file = self._tensors[name].file
        try:
            if file not in self._open:
                self._open[file] = self.enter_context(safe_open(file, framework="pt", device="cpu"))
            handle = self._open[file]
            found: Tensor = handle.get_tensor(name) if part is None else handle.get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
        return found


def check_types(folder: Path, names: Iterable[str], tensors: Mapping[str, FileTensor]) -> None:
    """Refuse plain weights that are not floating-point numbers of a known type."""
    odd = [f"{name} is {tensors[name].dtype}" for name in names if tensors[name].dtype not in _ITEM_BYTES]
    if odd:
        raise ModelError(
            f"{folder} contains weights of an unsupported type: {'; '.join(odd[:10])}"
            f"{f'; and {len(odd) - 10} more' if len(odd) > 10 else ''}; known: {', '.join(_ITEM_BYTES)}"
        )


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
    """The tensors one file says it holds, after checking that it is long enough to hold them."""
    size = file.stat().st_size
    if size < 8:
        raise ModelError(f"{file} is cut short: {size} bytes, a safetensors file has at least 8")
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > size - 8:
            raise ModelError(
                f"{file} is cut short or not safetensors: its header should have {header_bytes} bytes, "
                f"the whole file has {size}"
            )
        if header_bytes > _MOST_HEADER_BYTES:
            raise ModelError(
                f"{file} has a header of {header_bytes:,} bytes; safetensors allows {_MOST_HEADER_BYTES:,}"
            )
        raw = stream.read(header_bytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} has a damaged header: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file} has a damaged header: it is not a table of tensors")
    header.pop("__metadata__", None)
    data_bytes = size - 8 - header_bytes
    tensors = {name: _file_tensor(file, name, entry, data_bytes) for name, entry in header.items()}
    places = sorted(
        (*header[name]["data_offsets"], name) for name, tensor in tensors.items() if tensor.nbytes
    )
    for (_, end, name), (begin, _, other) in pairwise(places):
        if begin < end:
            raise ModelError(f"{file} has a damaged header: {shown(name)} and {shown(other)} overlap")
    return tensors


def _file_tensor(file: Path, name: str, entry: Any, data_bytes: int) -> FileTensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        bits = 8 * _ITEM_BYTES[dtype] if dtype in _ITEM_BYTES else _OTHER_BITS[dtype]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError("negative or fractional numbers")
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError("too many dimensions")
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file} has a damaged header: tensor {shown(name)} is described as {shown(entry)}"
        ) from error
    if end > data_bytes:
        raise ModelError(
            f"{file} is cut short: {name!r} ends at byte {end} of the data, the file has {data_bytes}"
        )
    if end - begin != math.ceil(math.prod(shape) * bits / 8):
        raise ModelError(
            f"{file} has a damaged header: {name!r} is {dtype} {list(shape)} but takes {end - begin} bytes"
        )
    return FileTensor(file, dtype, shape, end - begin)
