"""GGUFFile: the metadata and the tensor directory of a memory-mapped GGUF file. Opened by `load_model`.

The header is parsed here rather than by `gguf.GGUFReader`, which makes several Python objects per vocabulary
entry (seconds for a small model) and trusts every length it reads. Here every length is checked against the
file's size before it is used, so a truncated or damaged file ends in a ModelError that names what is wrong,
never in a huge allocation.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cumulo.errors import ModelError

FLOAT_TYPES = ("F32", "F16", "BF16")
# A type's number in the file (ggml.h, enum ggml_type): its name, the values in one block, and a block's bytes.
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    8: ("Q8_0", 32, 34), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
}  # fmt: skip
SUPPORTED_TYPES = tuple(name for name, _, _ in _TYPES.values())
BLOCK_BYTES = {name: size for name, _, size in _TYPES.values() if name not in FLOAT_TYPES}
_OTHER_TYPES = {  # that are named where a file is refused
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT_BYTES = 32
_MAX_DIMENSIONS = 4
_SMALLEST_TENSOR_ENTRY_BYTES = 32  # name length, dimension count, one dimension, type, offset
_SMALLEST_METADATA_ENTRY_BYTES = 13  # key length, value type, one byte of value
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_UINT64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class GGUFTensor:
    """One entry of the tensor directory. `shape` is outermost dimension first, as torch writes it."""

    name: str
    type_name: str  # "F32", "Q4_1", ...
    shape: tuple[int, ...]
    raw: np.ndarray  # [rows, bytes per row] uint8, a view of the mapped file

    @property
    def rows(self) -> int:
        """How many rows there are when all dimensions but the last are flattened."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]  # scalars, strings, lists
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError(f"{self.path}: the metadata has no general.architecture; it is not a model file")
        return name


def open_gguf(path: Path | str) -> GGUFFile:
    """Map a GGUF file, and the further pieces of a split one, and read everything but the weights."""
    path = Path(path)
    first = _read_one(path)
    pieces = first.metadata.get("split.count", 1)
    if not isinstance(pieces, int) or pieces <= 1:
        return first
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[3]) != pieces:
        raise ModelError(
            f"{path} says it is one of {pieces} pieces, but is not named like one "
            f"(NAME-00001-of-{pieces:05d}.gguf); give all pieces their original names"
        )
    names = [f"{match[1]}-{number:05d}-of-{pieces:05d}.gguf" for number in range(1, pieces + 1)]
    absent = [name for name in names if not (path.parent / name).is_file()]
    if absent:
        raise ModelError(
            f"{path} is one of {pieces} pieces; missing next to it: {', '.join(absent[:5])}"
            + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        )
    files = [_read_one(path.parent / name) for name in names]
    tensors: dict[str, GGUFTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise ModelError(f"{file.path}: tensor {name!r} is also in an earlier piece of the model")
            tensors[name] = tensor
    return GGUFFile(path.parent / names[0], files[0].metadata, tensors)


def _read_one(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            if size == 0:
                raise ModelError(f"{path} is empty; download it again")
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    header = _Header(path, mapped)
    tensor_count, metadata_count = header.counts()
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = header.string("a metadata key")
        if key in metadata:
            raise header.damaged(f"metadata key {key!r} appears twice")
        metadata[key] = header.value(key)
    entries = [header.tensor_entry() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise header.damaged(f"general.alignment is {alignment!r}, not a power of two")
    data_start = -(-header.position // alignment) * alignment
    content = np.frombuffer(mapped, dtype=np.uint8)
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_number, offset in entries:
        if name in tensors:
            raise header.damaged(f"tensor {name!r} appears twice")
        type_name, bytes_per_row = _row_layout(path, name, shape, type_number)
        begin = data_start + offset
        end = begin + math.prod(shape[:-1]) * bytes_per_row
        if end > len(content):
            raise ModelError(
                f"{path} is cut short: tensor {name!r} ({type_name} {list(shape)}) ends at byte {end:,} of a "
                f"file of {len(content):,}; download the file again"
            )
        raw = content[begin:end].reshape(-1, bytes_per_row)
        tensors[name] = GGUFTensor(name, type_name, shape, raw)
    return GGUFFile(path, metadata, tensors)


def _row_layout(path: Path, name: str, shape: tuple[int, ...], type_number: int) -> tuple[str, int]:
    """The name of a tensor's type and how many bytes one row of it takes."""
    if type_number not in _TYPES:
        if type_number not in _OTHER_TYPES:
            raise ModelError(
                f"{path}: tensor {name!r} has the unknown type number {type_number}; the file is damaged, or "
                "its type is newer than Cumulo"
            )
        raise ModelError(
            f"{path}: tensor {name!r} is stored as {_OTHER_TYPES[type_number]}, which Cumulo does not read; take a "
            f"file of the model in one of {', '.join(SUPPORTED_TYPES)} (as Q4_K_M, Q6_K, Q8_0 files are)"
        )
    type_name, block, block_bytes = _TYPES[type_number]
    if shape[-1] % block:
        raise ModelError(
            f"{path}: tensor {name!r} has rows of {shape[-1]} values, not a multiple of the {block} that one "
            f"{type_name} block holds; the file is damaged, download it again"
        )
    return type_name, shape[-1] // block * block_bytes


class _Header:
    """A cursor over the mapped bytes that refuses to read past their end."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path, self.mapped, self.size, self.position = path, mapped, len(mapped), 0

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {what}; download the file again")

    def require(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.position:
            raise ModelError(
                f"{self.path} is cut short or damaged: {what} at byte {self.position:,} needs {nbytes:,} "
                f"bytes, but the file ends at {self.size:,}; download the file again"
            )

    def unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        nbytes = struct.calcsize(layout)
        self.require(nbytes, what)
        values = struct.unpack_from(layout, self.mapped, self.position)
        self.position += nbytes
        return values

    def counts(self) -> tuple[int, int]:
        """Check magic and version; return how many tensors and metadata entries follow."""
        if self.mapped[:4] != b"GGUF":
            raise ModelError(
                f"{self.path} is not a GGUF file: it begins with {self.mapped[:4]!r}, not b'GGUF'"
            )
        self.position = 4
        (version,) = self.unpack("<I", "the version")
        if version & 0xFFFF == 0:
            raise ModelError(f"{self.path} is a big-endian GGUF file; take the little-endian one")
        if version not in _SUPPORTED_VERSIONS:
            raise ModelError(f"{self.path} is GGUF version {version}; versions 2 and 3 can be read")
        tensors, entries = self.unpack("<QQ", "the counts")
        self.require(entries * _SMALLEST_METADATA_ENTRY_BYTES, f"a list of {entries:,} metadata entries")
        self.require(tensors * _SMALLEST_TENSOR_ENTRY_BYTES, f"a list of {tensors:,} tensors")
        return tensors, entries

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """The hot loop of opening a file: vocabularies and merges are hundreds of thousands of strings."""
        self.require(8 * count, f"{what}: {count:,} strings")
        mapped, position, size = self.mapped, self.position, self.size
        result: list[str] = []
        try:
            for _ in range(count):
                begin = position + 8
                position = begin + _UINT64.unpack_from(mapped, position)[0]
                if position > size:
                    raise struct.error
                result.append(str(mapped[begin:position], "utf-8"))
        except struct.error:
            raise ModelError(
                f"{self.path} is cut short or damaged: {what} runs past the end of the file ({size:,} "
                "bytes); download the file again"
            ) from None
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not valid UTF-8") from None
        self.position = position
        return result

    def value(self, key: str) -> Any:
        what = f"metadata {key!r}"
        (kind,) = self.unpack("<I", what)
        if kind == _STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind], what)[0]
        if kind != _ARRAY:
            raise self.damaged(f"{what} has the unknown value type {kind}")
        kind, count = self.unpack("<IQ", what)
        if kind == _STRING:
            return self.strings(count, what)
        if kind not in _SCALARS:
            raise self.damaged(f"{what} is an array of the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self.require(count * dtype.itemsize, what)
        values = np.frombuffer(self.mapped, dtype, count, self.position)
        self.position += values.nbytes
        return values.tolist()

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor's name")
        (dimensions,) = self.unpack("<I", f"tensor {name!r}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name!r} has {dimensions:,} dimensions")
        shape = self.unpack(f"<{dimensions}Q", f"tensor {name!r}")
        if 0 in shape:
            raise self.damaged(f"tensor {name!r} has the shape {list(reversed(shape))}")
        type_number, offset = self.unpack("<IQ", f"tensor {name!r}")
        return name, tuple(reversed(shape)), type_number, offset
