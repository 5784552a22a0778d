"""Boxes in and out of `torch.distributed.checkpoint`, whose files are our format. Called by `store.py`.

torch's own planners know whole tensors and its own sharded ones; these know `Part`s, so that a tensor may be stored
by any number of ranks in any rectangles and read back in any others.
"""

import contextlib
import enum
import io
import logging
import math
import pickle
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from cumulo.checkpoint.play.folder import writing_threads
from cumulo.checkpoint.play.held import Part
from cumulo.errors import TrainingError
from cumulo.ranks.groups import Group

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
        if (module, name) == ("builtins", "getattr"):
            return self._enum_member
        raise self._refusal(module, name)

    def _enum_member(self, kind: Any, name: str) -> Any:
        """Some versions of Python 3.11 write a member of an enumeration so, and nothing else."""
        if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
            raise self._refusal("builtins", "getattr")
        return kind[name]

    def _refusal(self, module: str, name: str) -> TrainingError:
        return TrainingError(
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


def write_parts(folder: Path, parts: Sequence[Part], group: Group | None) -> None:
    """Every rank of `group` calls it with what it stores; None: there is only this process."""
    # A file a thread. `folder.py` forces files to disk when it hashes them.
    writer = FileSystemWriter(folder, sync_files=False, thread_count=writing_threads())
    with quiet():
        save({}, storage_writer=writer, planner=_Saving(parts), process_group=group, no_dist=group is None)


@torch.no_grad()
def read_parts(folder: Path, parts: Sequence[Part]) -> None:
    """Overwrite the parts' tensors. Each rank reads for itself what it needs."""
    with quiet():
        load({}, storage_reader=CheckedReader(folder), planner=_Loading(parts), no_dist=True)


def stored_shapes(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Whole shape and type of every tensor in a folder."""
    entries = read_metadata(folder).state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _index(part: Part) -> MetadataIndex:
    return MetadataIndex(part.name, torch.Size(part.offset))


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offset), part.tensor.shape)


class _Saving(DefaultSavePlanner):
    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = {_index(part): part for part in parts}

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    index,
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        _chunk(part), TensorProperties.create_from_tensor(part.tensor), torch.Size(part.whole)
                    ),
                )
                for index, part in self.parts.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, entry in metadata.state_dict_metadata.items():
            stored = sum(math.prod(chunk.sizes) for chunk in cast(TensorStorageMetadata, entry).chunks)
            wanted = math.prod(cast(TensorStorageMetadata, entry).size)
            if stored != wanted:
                raise TrainingError(f"of {name}'s {wanted:,} elements the ranks together store {stored:,}")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.parts[write_item.index].tensor


class _Loading(DefaultLoadPlanner):
    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts: dict[str, list[Part]] = {}
        for part in parts:
            self.parts.setdefault(part.name, []).append(part)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        found = self.metadata.state_dict_metadata
        for name, parts in self.parts.items():
            entry = found.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise TrainingError(f"it has no {name}")
            if tuple(entry.size) != parts[0].whole:
                raise TrainingError(f"its {name} is {list(entry.size)}, not {list(parts[0].whole)}")
            items += create_read_items_for_chunk_list(name, entry, [_chunk(part) for part in parts])
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """torch's own would run whatever program is in them."""
        raise TrainingError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        target = self.parts[index.fqn][cast(int, index.index)].tensor
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, begin, length)
        return target


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch remarks that there is only one process, which is what we asked for."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed")
        try:
            yield
        finally:
            logger.setLevel(level)
