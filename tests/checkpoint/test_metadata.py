"""A checkpoint's metadata is a pickle: what it may name is known, and nothing else in it runs."""

import collections
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from cumulo.checkpoint.play.boxes import read_metadata, stored_shapes
from cumulo.checkpoint.play.folder import MANIFEST, entries
from cumulo.checkpoint.play.held import held_whole
from cumulo.checkpoint.play.store import CheckpointStore
from cumulo.errors import TrainingError
from tests.checkpoint.test_store import Saved, state


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    run = Saved(tmp_path / "checkpoints", print)
    run.save(3, state(1.5), {}, later=False)
    return run


def _tensors(saved: Saved) -> Path:
    checkpoint = saved.latest()
    assert checkpoint is not None
    return checkpoint.path / "tensors"


class _Runs:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_what_torch_writes_is_read_as_torch_reads_it(saved: Saved) -> None:
    folder = _tensors(saved)
    ours, theirs = read_metadata(folder), FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert stored_shapes(folder)["model.half"] == ((7,), torch.bfloat16)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_program_in_the_metadata_does_not_run(saved: Saved, tmp_path: Path, protocol: int) -> None:
    folder, mark = _tensors(saved), tmp_path / "it ran"
    good = read_metadata(folder)
    for call in (
        _Runs(os.system, f"touch '{mark}'"),
        _Runs(eval, f"open({str(mark)!r}, 'w')"),
        _Runs(open, str(mark), "w"),
        _Runs(Path.touch, mark),
        _Runs(getattr, "text", "upper"),
        _Runs(torch.save, good, str(mark)),
    ):
        for content in (call, Metadata({"model.weight": call}), collections.OrderedDict(a=call)):
            (folder / ".metadata").write_bytes(pickle.dumps(content, protocol))
            with pytest.raises(TrainingError, match="which could run a program") as refused:
                read_metadata(folder)
            assert "\n" not in str(refused.value)
    assert not mark.exists()


def test_loading_a_checkpoint_with_a_program_is_refused_whole(saved: Saved, tmp_path: Path) -> None:
    """Its manifest is right: whoever can change the metadata can also write the hash."""
    folder, mark = _tensors(saved), tmp_path / "it ran"
    (folder / ".metadata").write_bytes(pickle.dumps(_Runs(os.system, f"touch '{mark}'")))
    whole = folder.parent
    files = [path for path in whole.rglob("*") if path.is_file() and path.name != MANIFEST]
    (whole / MANIFEST).write_text(json.dumps(entries(whole, files)))
    store = CheckpointStore(whole.parent, 2, print)
    checkpoint = store.latest()
    assert checkpoint is not None
    with pytest.raises(TrainingError, match="could run a program"):
        store.load(checkpoint, held_whole(state(0.0)))
    assert not mark.exists()


def _changed(folder: Path, change: Any) -> None:
    metadata = read_metadata(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", ["../../facts.json", "/etc/passwd", "deep/file", ".."])
def test_pieces_lie_in_the_checkpoints_folder(saved: Saved, name: str) -> None:
    folder = _tensors(saved)

    def change(metadata: Metadata) -> None:
        for index in metadata.storage_data:
            metadata.storage_data[index] = _StorageInfo(name, 0, 10)

    _changed(folder, change)
    with pytest.raises(TrainingError, match="which is no file of the checkpoint"):
        read_metadata(folder)


def test_a_tensor_that_no_file_holds_takes_no_memory(saved: Saved) -> None:
    folder = _tensors(saved)

    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.weight"].size = torch.Size((1 << 40, 1 << 20))

    _changed(folder, change)
    with pytest.raises(TrainingError, match="more than all files hold together"):
        stored_shapes(folder)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04N.", b"garbage", pickle.dumps({"a": 1}), b"\x80\x04\x95\xff"]
)
def test_damaged_metadata_is_a_plain_error(saved: Saved, content: bytes) -> None:
    folder = _tensors(saved)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(TrainingError, match=r"damaged|describes no checkpoint"):
        read_metadata(folder)
