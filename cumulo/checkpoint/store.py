"""CheckpointStore: a run's checkpoints. The trainer saves named tensors and facts, and loads the latest good one.

Tensors are stored by `torch.distributed.checkpoint`, whose files can be read back in pieces of any cut. Saving
copies the tensors aside and goes on; a thread writes. Loading verifies hashes, and falls back to an older one.
"""

import contextlib
import json
import logging
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from cumulo.checkpoint.folder import damage, remove_unfinished, write_whole
from cumulo.errors import TrainingError

_PREFIX = "step-"
_FAILURES = (Exception, CheckpointException)  # torch's own is no Exception


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    facts: Mapping[str, Any]


class CheckpointStore:
    def __init__(self, folder: Path, keep: int, tell: Callable[[str], None]) -> None:
        """`tell` hears of what went wrong and was survived."""
        self.folder, self.keep, self.tell = folder, keep, tell
        self.failed: str | None = None  # why the latest save did not succeed
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)

    # -- saving --------------------------------------------------------------------------------------------
    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], later: bool) -> float:
        """Save; `later`: return as soon as the tensors may change. Returns the seconds it took."""
        begin = time.perf_counter()
        self.wait()
        if not later:
            self._write(step, {name: tensor.detach() for name, tensor in tensors.items()}, dict(facts))
            return time.perf_counter() - begin
        self._copy(tensors)
        self._thread = threading.Thread(
            target=self._write, args=(step, self._copies, dict(facts)), name="checkpoint-writer"
        )
        self._thread.start()
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Until what is being written is on disk, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Into memory that is kept from save to save: allocating and pinning it is slower than the copy."""
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                )
            self._copies[name].copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()

    def _write(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        def fill(aside: Path) -> None:
            with _quiet():
                save_tensors(dict(tensors), checkpoint_id=aside / "tensors", no_dist=True)
            (aside / "facts.json").write_text(json.dumps({"step": step, **facts}, indent=1), "utf-8")

        try:
            write_whole(self._path(step), fill)
        except _FAILURES as error:  # disk full, no permission, ...: the run need not die of it
            self.failed = (
                f"the checkpoint of step {step} could not be written to {self.folder}: {_cause(error)}"
            )
            self.tell(f"{self.failed}; training goes on, the previous checkpoint is kept")
            return
        self.failed = None
        for old in self.paths()[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)

    # -- loading -------------------------------------------------------------------------------------------
    def paths(self) -> list[Path]:
        """Finished checkpoints, latest first, verified or not."""
        found = [
            path for path in self.folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()
        ]
        return sorted(found, reverse=True)

    def latest(self) -> Checkpoint | None:
        """The latest checkpoint whose every byte is as it was written; None where there is none at all."""
        self.wait()
        paths = self.paths()
        for path in paths:
            if (problem := damage(path)) is None:
                facts = json.loads((path / "facts.json").read_text("utf-8"))
                return Checkpoint(path, int(facts["step"]), facts)
            self.tell(f"{path} is damaged: {problem}; trying the one before it")
        if paths:
            raise TrainingError(
                f"none of the {len(paths)} checkpoints in {self.folder} is whole; begin again in another folder"
            )
        return None

    def load(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite `tensors` by the stored ones of the same names."""
        try:
            with _quiet(), torch.no_grad():
                load_tensors(dict(tensors), checkpoint_id=checkpoint.path / "tensors", no_dist=True)
        except _FAILURES as error:
            raise TrainingError(
                f"{checkpoint.path} does not hold this model and optimizer ({_cause(error)}); "
                "was the configuration changed since it was written?"
            ) from error

    def _path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:09d}"


def _cause(error: BaseException) -> str:
    """The first line of what happened, out of torch's wrapping."""
    inner = getattr(error, "failures", None)
    if isinstance(inner, Mapping) and inner:
        error = next(iter(inner.values()))[0]
    chain: BaseException | None = error
    while (
        chain is not None
    ):  # a full disk reaches us as a complaint about the file's format, raised over the OSError
        if isinstance(chain, OSError):
            return f"{type(chain).__name__}: {chain.strerror or chain}"
        chain = chain.__cause__ or chain.__context__
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"


@contextlib.contextmanager
def _quiet() -> Any:
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
