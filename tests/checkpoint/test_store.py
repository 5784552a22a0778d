"""Checkpoints: whole or absent, verified, with a way back; bytes are flipped, cut and refused for real."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cumulo.checkpoint.play.folder import UNFINISHED, write_whole
from cumulo.checkpoint.play.held import held_whole
from cumulo.checkpoint.play.saver import Saver
from cumulo.checkpoint.play.store import Checkpoint, CheckpointStore
from cumulo.errors import TrainingError


def state(value: float) -> dict[str, Tensor]:
    return {
        "model.weight": torch.full((50, 30), value),
        "model.half": torch.full((7,), value, dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(value),
    }


@pytest.fixture
def heard() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path, heard: list[str]) -> "Saved":
    return Saved(tmp_path / "checkpoints", heard.append)


class Saved:
    """A store and its saver, as a trainer has them."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.store, self.saver = CheckpointStore(folder, 2, tell), Saver(0, tell)

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict[str, int], later: bool) -> float:
        return self.saver.save(step, held_whole(tensors), facts, [self.store], later)

    def latest(self) -> Checkpoint | None:
        self.saver.wait()
        return self.store.latest()


def loaded(run: Saved) -> tuple[int, float]:
    checkpoint = run.latest()
    assert checkpoint is not None
    tensors = state(-1.0)
    run.store.load(checkpoint, held_whole(tensors))
    values = {float(value) for tensor in tensors.values() for value in tensor.flatten()}
    assert len(values) == 1
    return checkpoint.step, values.pop()


@pytest.mark.parametrize("later", [False, True])
def test_what_is_saved_is_loaded_even_if_it_changes_while_it_is_written(
    later: bool, run: Saved, heard: list[str]
) -> None:
    tensors = state(3.0)
    assert run.save(10, tensors, {"samples": 7}, later) > 0
    assert run.saver.settle() >= 0
    for tensor in tensors.values():
        tensor.fill_(99.0)
    assert loaded(run) == (10, 3.0)
    checkpoint = run.latest()
    assert checkpoint is not None
    assert checkpoint.facts["samples"] == 7
    assert heard == []


def test_only_the_latest_are_kept(run: Saved) -> None:
    for step in range(1, 6):
        run.save(step, state(float(step)), {}, later=True)
    run.saver.wait()
    assert [path.name for path in run.store.paths()] == ["step-000000005", "step-000000004"]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "manifest", "facts"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    harm: str, run: Saved, heard: list[str]
) -> None:
    run.save(1, state(1.0), {}, later=False)
    run.save(2, state(2.0), {}, later=False)
    data = next((run.store.paths()[0] / "tensors").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif harm == "cut":
        data.write_bytes(content[:-100])
    elif harm == "remove":
        data.unlink()
    elif harm == "manifest":
        (run.store.paths()[0] / "manifest.json").write_text("{")
    else:
        (run.store.paths()[0] / "facts.json").write_text('{"step": 9}')
    assert loaded(run) == (1, 1.0)
    (message,) = heard
    assert "step-000000002 is damaged: " in message
    assert {"flip": "hash differs", "cut": "bytes instead of", "remove": "is missing", "manifest": "manifest.json",
            "facts": "facts.json"}[harm] in message  # fmt: skip


def test_when_nothing_is_whole_it_says_so(run: Saved) -> None:
    assert run.latest() is None
    run.save(1, state(1.0), {}, later=False)
    (run.store.paths()[0] / "facts.json").unlink()
    with pytest.raises(TrainingError, match="none of the 1 checkpoints"):
        run.latest()


@pytest.mark.parametrize("later", [False, True])
def test_a_failed_write_leaves_nothing_and_the_previous_one_stays(
    later: bool, run: Saved, heard: list[str]
) -> None:
    run.save(1, state(1.0), {}, later=False)

    # A file may not grow past a few bytes: a write fails for real, in the middle, as on a full disk.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        run.save(2, state(2.0), {}, later)
        run.saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.saver.failed is not None
    assert "step 2" in heard[0]
    assert "File too large" in heard[0]
    assert not list(run.store.folder.glob(f"*{UNFINISHED}"))
    assert loaded(run) == (1, 1.0)
    run.save(3, state(3.0), {}, later)
    assert loaded(run) == (3, 3.0)
    assert run.saver.failed is None


def test_what_a_crash_left_half_written_is_no_checkpoint(tmp_path: Path, heard: list[str]) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(RuntimeError, match="crash"):
        write_whole(folder / "step-000000001", _crash)
    (folder / f"step-000000002{UNFINISHED}" / "tensors").mkdir(parents=True)
    assert CheckpointStore(folder, 2, heard.append).latest() is None
    assert list(folder.iterdir()) == []


def _crash(aside: Path) -> None:
    (aside / "tensors").mkdir()
    (aside / "tensors" / "some").write_text("half")
    raise RuntimeError("crash")


def test_a_checkpoint_of_another_model_is_refused(run: Saved) -> None:
    run.save(1, state(1.0), {}, later=False)
    checkpoint = run.latest()
    assert checkpoint is not None
    with pytest.raises(TrainingError, match="does not contain this model"):
        run.store.load(checkpoint, held_whole({"model.other": torch.zeros(3)}))
