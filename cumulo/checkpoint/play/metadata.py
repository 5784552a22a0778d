"""A checkpoint's .metadata, read without running anything in it. Used by `boxes.py`.

`torch.distributed.checkpoint` writes it as a pickle, and a pickle may name any function to be called. Here only the
few classes that torch itself writes there are known, none of which does anything when it is made; whatever else is
named ends the reading. Then every place in it is checked: a checkpoint may come from somebody else.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from cumulo.errors import TrainingError

_MOST_BYTES = 1 << 30
_MOST_DIMENSIONS = 16
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = frozenset(
    [
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_FILESYSTEM, "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),  # a look into a table of torch's layouts
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),  # as Python 3.13 calls it
        ("collections", "OrderedDict"),
    ]
)


class CheckedReader(FileSystemReader):
    """torch's reader of a folder, for a folder that is not trusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """What a folder of tensors says it holds. Raises TrainingError for anything that no checkpoint contains."""
    path = folder / ".metadata"
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise TrainingError(f"{path} has {size:,} bytes, more than the description of any checkpoint")
        content = path.read_bytes()
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        found = _KnownOnly(io.BytesIO(content), path).load()
    except TrainingError:
        raise
    except Exception as error:  # damaged pickles raise whatever they hit first
        raise TrainingError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(found, Metadata):
        raise TrainingError(f"{path} describes no checkpoint but a {type(found).__name__}")
    try:
        _check(folder, found)
    except (TypeError, ValueError, AttributeError) as error:
        raise TrainingError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return found


class _KnownOnly(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise TrainingError(
            f"{self._path} names {module}.{name}, which no checkpoint contains and which could run a program; "
            "it was not read. Do not use a checkpoint from somebody you do not trust"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise TrainingError(f"{self._path} refers to an object outside of it, which no checkpoint does")


def _check(folder: Path, metadata: Metadata) -> None:
    """Files lie in the folder, pieces in their files, and no tensor is larger than all files together."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    for index, place in (metadata.storage_data or {}).items():
        name, offset, length = place.relative_path, place.offset, place.length
        if not isinstance(name, str) or name not in sizes:
            raise TrainingError(
                f"{folder}: {index.fqn} is said to be in {name!r}, which is no file of the checkpoint"
            )
        if not 0 <= offset <= offset + length <= sizes[name]:
            raise TrainingError(f"{folder}: {index.fqn} is said to end beyond the end of {name}")
    most_bytes = sum(sizes.values())
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        shape = tuple(entry.size)
        if len(shape) > _MOST_DIMENSIONS or any(length < 0 for length in shape):
            raise TrainingError(f"{folder}: {name} is said to have the shape {list(shape)[:20]}")
        if math.prod(shape) * entry.properties.dtype.itemsize > most_bytes:
            raise TrainingError(
                f"{folder}: {name} is said to have the shape {list(shape)}, more than all files hold together"
            )
