"""CheckpointStore: a run's checkpoints in a folder that all its ranks see. `Saver` writes to it, the trainer loads.

Tensors are in `torch.distributed.checkpoint`'s files, which are read back in pieces of any cut: a run goes on under
any layout. A checkpoint is whole or absent; loading verifies every hash and falls back to an older one. All methods
are called by all ranks.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cumulo.checkpoint.play.boxes import read_parts, write_parts
from cumulo.checkpoint.play.folder import (
    Manifest,
    aside_of,
    begin_aside,
    damage,
    entries,
    finish_aside,
    remove_unfinished,
)
from cumulo.checkpoint.play.held import Held, Part, all_parts
from cumulo.errors import TrainingError
from cumulo.ranks.team import FAILURES, Team, cause

_PREFIX = "step-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    facts: Mapping[str, Any]


class Store(Protocol):
    """Where states go and come from: a folder, or the nodes' memory."""

    place: str  # for people

    def write(self, step: int, parts: Sequence[Part], facts: Mapping[str, Any]) -> None: ...
    def load(self, checkpoint: Checkpoint, state: Mapping[str, Held]) -> None: ...


class CheckpointStore:
    def __init__(
        self,
        folder: Path,
        keep: int,
        tell: Callable[[str], None],
        team: Team | None = None,
        may_publish: Callable[[], None] = lambda: None,
    ) -> None:
        """`tell` hears of what went wrong and was survived. `may_publish` raises where rank 0 must not finish a
        checkpoint any more."""
        self.folder, self.keep, self.tell, self.team = folder, keep, tell, team or Team()
        self._may_publish = may_publish
        self.place = str(folder)
        self.team.first(self._clean)

    def _clean(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.folder)

    # -- saving --------------------------------------------------------------------------------------------
    def write(self, step: int, parts: Sequence[Part], facts: Mapping[str, Any]) -> None:
        """Each rank brings the parts that it stores."""
        path, team = self.path_of(step), self.team
        try:
            aside = team.first(lambda: begin_aside(path))
            team.together(lambda: write_parts(aside / "tensors", parts, team.group))
            lines = team.together(lambda: entries(aside, self._own_files(aside)))
            team.first(lambda: self._finish(aside, path, lines, {"step": step, **facts}))
        except BaseException:
            if team.rank == 0:
                shutil.rmtree(aside_of(path), ignore_errors=True)
            raise

    def _own_files(self, aside: Path) -> list[Path]:
        own = list((aside / "tensors").glob(f"__{self.team.rank}_*"))
        return [*own, aside / "tensors/.metadata"] if self.team.rank == 0 else own

    def _finish(self, aside: Path, path: Path, lines: Sequence[Manifest], facts: Mapping[str, Any]) -> None:
        (aside / "facts.json").write_text(json.dumps(facts, indent=1), "utf-8")
        manifest = entries(aside, [aside / "facts.json"])
        for part in lines:
            manifest |= part
        self._may_publish()
        finish_aside(aside, path, manifest)
        for old in self.paths()[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)

    # -- loading -------------------------------------------------------------------------------------------
    def paths(self) -> list[Path]:
        """Finished checkpoints, latest first, verified or not."""
        found = [
            path for path in self.folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()
        ]
        return sorted(found, reverse=True)

    def steps(self) -> list[int]:
        """Of the finished checkpoints, verified or not, latest first; by one rank alone."""
        return [int(path.name.removeprefix(_PREFIX)) for path in self.paths()]

    def latest(self) -> Checkpoint | None:
        """The latest checkpoint whose every byte is as it was written; None where there is none at all."""
        team = self.team
        paths = team.first(self.paths)
        for path in paths:
            problem = self._damage(path)
            if problem is None:
                return self._opened(path)
            self.tell(f"{path} is damaged: {problem}; trying the previous one")
        if paths:
            raise TrainingError(
                f"none of the {len(paths)} checkpoints in {self.folder} is complete; start again in another folder"
            )
        return None

    def _damage(self, path: Path) -> str | None:
        found = self.team.together(lambda: damage(path, self.team.rank, self.team.size))
        return next((problem for problem in found if problem is not None), None)

    def _opened(self, path: Path) -> Checkpoint:
        facts = self.team.first(lambda: json.loads((path / "facts.json").read_text("utf-8")))
        return Checkpoint(path, int(facts["step"]), facts)

    def load(self, checkpoint: Checkpoint, state: Mapping[str, Held]) -> None:
        """Overwrite `state` by the stored tensors of the same names."""
        try:
            self.team.together(lambda: read_parts(checkpoint.path / "tensors", all_parts(state)))
        except FAILURES as error:
            raise TrainingError(
                f"{checkpoint.path} does not contain this model and optimizer ({cause(error)}); "
                "was the configuration changed since it was written?"
            ) from error

    def path_of(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:09d}"
