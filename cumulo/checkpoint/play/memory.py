"""MemoryStore: a run's latest state in its nodes' memory, and again in that of a peer node. A second place beside
`CheckpointStore`, written more often and read first: it survives the death of processes, and of one node.

Memory is a folder of a file system that lies in it (/dev/shm): a rank's part is one safetensors file there. All
methods are called by all ranks.
"""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cumulo.checkpoint.decide.memory_plan import (
    MemoryFile,
    fetches,
    file_of,
    freshest,
    keepers,
    overlap,
    providers,
)
from cumulo.checkpoint.play.held import Held, Part, all_parts
from cumulo.checkpoint.play.store import Checkpoint
from cumulo.errors import TrainingError
from cumulo.layout.pieces import Box
from cumulo.ranks.collectives import Peers
from cumulo.ranks.team import FAILURES, Team, cause

_UNFINISHED = ".part"


def node_name() -> str:
    """This machine's; CUMULO_NODE tells several on one machine apart."""
    return os.environ.get("CUMULO_NODE") or platform.node() or "node"


def memory_folder(root: Path, run_folder: Path) -> Path:
    """Where a run's memory is on this node."""
    run = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    return root / f"cumulo-{run}" / node_name()


class MemoryStore:
    def __init__(self, folder: Path, team: Team, node: str | None = None) -> None:
        self.folder, self.team = folder, team
        self.place = f"memory ({folder})"
        self.nodes = team.together(lambda: node or node_name())
        self.keepers = keepers(self.nodes)
        team.together(self._clean)

    def _clean(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"*{_UNFINISHED}"):  # by a rank that died while it wrote
            left.unlink(missing_ok=True)

    # -- saving --------------------------------------------------------------------------------------------
    def write(self, step: int, parts: Sequence[Part], facts: Mapping[str, Any]) -> None:
        team = self.team
        file = MemoryFile(step, team.size, team.rank)
        team.together(
            lambda: self._put(file, lambda path: _write_parts(path, parts, {"step": step, **facts}))
        )
        sizes = team.together(lambda: (self.folder / file.name).stat().st_size)
        self._exchange(step, sizes)
        # Only when everybody has the new one may the old one go.
        team.together(lambda: None)
        self._forget(lambda other: other.step != step or other.world != team.size)

    def _exchange(self, step: int, sizes: Sequence[int]) -> None:
        """Send the own file to its keeper, and keep those of others."""
        team, keeper = self.team, self.keepers[self.team.rank]
        if team.group is None:
            return  # nobody else keeps it
        peers = Peers(team.group)
        kept = {
            rank: torch.empty(sizes[rank], dtype=torch.uint8)
            for rank, other in enumerate(self.keepers)
            if other == team.rank
        }
        waits = [peers.receive(content, rank) for rank, content in kept.items()]
        if keeper is not None:
            waits.append(peers.send(self._bytes(MemoryFile(step, team.size, team.rank)), keeper))
        for wait in waits:
            wait.wait()
        for rank, content in kept.items():
            self._keep(MemoryFile(step, team.size, rank), content)

    def forget(self) -> None:
        """Everything: another run begins here, or this one does not want to go on from it."""
        self.team.together(lambda: self._forget(lambda file: True))

    def remove(self) -> None:
        """The run has ended well, and its checkpoint is stored: give the memory back."""
        self.forget()
        for folder in (self.folder, self.folder.parent):
            with contextlib.suppress(OSError):  # another rank was first, or another node's folder is in it
                folder.rmdir()

    # -- loading -------------------------------------------------------------------------------------------
    def latest(self) -> Checkpoint | None:
        """The latest state that is whole over all nodes' memories; None: there is none."""
        files = freshest(self._gathered())
        if not files:
            return None
        facts = self.team.together(lambda: self._facts(files))
        found: Mapping[str, Any] = next(fact for fact in facts if fact is not None)
        return Checkpoint(self.folder, files[0].step, found)

    def load(self, checkpoint: Checkpoint, state: Mapping[str, Held]) -> None:
        """Overwrite `state`. What is not in this node's memory is fetched from another's."""
        team, have = self.team, self._gathered()
        files = freshest(have)
        wanted = all_parts(state)
        try:
            known = self._tables(files, have)
            own = frozenset(file for file in files if _needs(wanted, known[file]))
            need = team.together(lambda: own)
            for fetch in fetches(self.nodes, have, need):
                self._fetch(fetch.file, fetch.source, fetch.target)
            team.together(lambda: None)  # a node's other ranks wait for the one that fetches
            team.together(lambda: _fill(wanted, {file: self.folder / file.name for file in own}, known))
        except FAILURES as error:
            raise TrainingError(
                f"the copy of step {checkpoint.step} in memory cannot be used ({cause(error)})"
            ) from error

    def _gathered(self) -> list[frozenset[MemoryFile]]:
        return self.team.together(self._files)

    def _files(self) -> frozenset[MemoryFile]:
        found = (file_of(path.name) for path in self.folder.glob("step-*.safetensors"))
        return frozenset(file for file in found if file is not None)

    def _facts(self, files: Sequence[MemoryFile]) -> Mapping[str, Any] | None:
        own = self._files()
        for file in files:
            if file in own:
                facts: Mapping[str, Any] = json.loads(_header(self.folder / file.name)["facts"])
                return facts
        return None

    def _tables(
        self, files: Sequence[MemoryFile], have: Sequence[frozenset[MemoryFile]]
    ) -> dict[MemoryFile, "Table"]:
        """What is in which file, told by the first rank that has it."""
        sources = providers(have)
        told = self.team.together(
            lambda: {
                file: _table(self.folder / file.name) for file in files if sources[file] == self.team.rank
            }
        )
        return {file: table for tables in told for file, table in tables.items()}

    def _fetch(self, file: MemoryFile, source: int, target: int) -> None:
        rank, group = self.team.rank, self.team.group
        if group is None:
            return
        peers = Peers(group)
        if rank == source:
            content = self._bytes(file)
            peers.send(torch.tensor([len(content)]), target).wait()
            peers.send(content, target).wait()
        elif rank == target:
            size = torch.zeros(1, dtype=torch.int64)
            peers.receive(size, source).wait()
            content = torch.empty(int(size), dtype=torch.uint8)
            peers.receive(content, source).wait()
            self._keep(file, content)

    # -- files ---------------------------------------------------------------------------------------------
    def _bytes(self, file: MemoryFile) -> Tensor:
        path = self.folder / file.name
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def _keep(self, file: MemoryFile, content: Tensor) -> None:
        self._put(file, lambda path: path.write_bytes(content.numpy().data))

    def _put(self, file: MemoryFile, fill: Callable[[Path], object]) -> None:
        """A file appears whole or not at all."""
        path = self.folder / file.name
        aside = path.with_suffix(_UNFINISHED)
        try:
            fill(aside)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def _forget(self, which: Callable[[MemoryFile], bool]) -> None:
        for file in self._files():
            if which(file):
                (self.folder / file.name).unlink(missing_ok=True)


Shape = tuple[int, ...]
# By key: name and whole shape of a tensor, and the box of it in the file.
Table = dict[str, tuple[str, Shape, Box]]


def _write_parts(path: Path, parts: Sequence[Part], facts: Mapping[str, Any]) -> None:
    tensors = {str(number): _alone(part.tensor) for number, part in enumerate(parts)}
    table = [(part.name, part.whole, part.offset, tuple(part.tensor.shape)) for part in parts]
    save_file(tensors, path, metadata={"facts": json.dumps(facts), "parts": json.dumps(table)})


def _alone(tensor: Tensor) -> Tensor:
    """In storage of its own, as the format wants it."""
    own = tensor.detach().cpu().contiguous()
    return own.clone() if own.untyped_storage().nbytes() != own.nbytes else own


def _header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as content:
        found: dict[str, str] = content.metadata()
    return found


def _table(path: Path) -> Table:
    return {
        str(number): (name, tuple(whole), Box(tuple(offset), tuple(size), tuple(offset)))
        for number, (name, whole, offset, size) in enumerate(json.loads(_header(path)["parts"]))
    }


def _box(part: Part) -> Box:
    return Box(part.offset, tuple(part.tensor.shape), part.offset)


def _needs(wanted: Sequence[Part], table: Table) -> bool:
    stored: dict[str, list[Box]] = {}
    for name, _, box in table.values():
        stored.setdefault(name, []).append(box)
    return any(overlap(_box(part), box) is not None for part in wanted for box in stored.get(part.name, ()))


def _within(common: Box, stored: Box) -> tuple[slice, ...]:
    """The common box as slices of the stored one."""
    return tuple(
        slice(first - begin, first - begin + length)
        for first, begin, length in zip(common.offset, stored.offset, common.size, strict=True)
    )


@torch.no_grad()
def _fill(
    wanted: Sequence[Part], paths: Mapping[MemoryFile, Path], known: Mapping[MemoryFile, Table]
) -> None:
    targets: dict[str, list[Part]] = {}
    for part in wanted:
        targets.setdefault(part.name, []).append(part)
    filled = 0
    for file, path in paths.items():
        with safe_open(path, "pt") as content:
            for key, (name, whole, box) in known[file].items():
                for part in targets.get(name, ()):
                    if part.whole != whole:
                        raise TrainingError(f"its {name} is {list(whole)}, not {list(part.whole)}")
                    common = overlap(_box(part), box)
                    if common is not None:
                        inside = _within(common, box)
                        stored = content.get_slice(key)[inside] if inside else content.get_tensor(key)
                        part.tensor[common.held_slices].copy_(stored)
                        filled += stored.numel()
    if filled != sum(part.tensor.numel() for part in wanted):
        raise TrainingError("it has not all of the tensors")
