"""Boxes in and out of `torch.distributed.checkpoint`, whose files are our format. Called by `store.py`.

torch's own planners know whole tensors and its own sharded ones; these know `Part`s, so that a tensor may be stored
by any number of ranks in any rectangles and read back in any others.
"""

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from cumulo.checkpoint.play.folder import writing_threads
from cumulo.checkpoint.play.held import Part
from cumulo.checkpoint.play.metadata import CheckedReader, read_metadata
from cumulo.errors import TrainingError
from cumulo.ranks.groups import Group


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


class _Saving(SavePlanner):
    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = {_index(part): part for part in parts}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

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

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.parts[write_item.index].tensor


class _Loading(LoadPlanner):
    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts: dict[str, list[Part]] = {}
        for part in parts:
            self.parts.setdefault(part.name, []).append(part)
        self.metadata = Metadata({})

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is not None:
            self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, parts in self.parts.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise TrainingError(f"it has no {name}")
            if tuple(entry.size) != parts[0].whole:
                raise TrainingError(f"its {name} is {list(entry.size)}, not {list(parts[0].whole)}")
            items += create_read_items_for_chunk_list(name, entry, [_chunk(part) for part in parts])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise TrainingError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        target = self.parts[index.fqn][cast(int, index.index)].tensor
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, begin, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


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
