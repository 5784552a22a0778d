"""Schedules over shared memory, without copies between processes: a rank writes what it sends into a window that
its peers map, and a peer adds it from there to its own. The ranks of one host use it.

    player = SharedMemoryPlayer(rank, ranks, store, timeout_s=60)
    player.run(schedule, tensor)

A chunk has two places: its home in the caller's tensor, and one in the window. A sum is written into the window
when its home is read, and back, so that it is not copied before it is sent on. A rank goes on to its next step
before its sends were read; it waits when it is about to write over them.
"""

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from cumulo.base.quantities import quantity
from cumulo.collectives.decide.schedule import CollectiveSchedule, CollectiveStep, Move, Transfer
from cumulo.collectives.play.homes import Homes, add
from cumulo.collectives.play.mailboxes import Mailboxes, forget_file, shared_file
from cumulo.collectives.play.waiting import CollectiveFailed, CollectiveStanding, MessageHead
from cumulo.errors import ConfigError


class SharedMemoryPlayer:
    def __init__(
        self, rank: int, nodes: int, store: Store, timeout_s: float = 60.0, channels: int = 4
    ) -> None:
        """`nodes`: ranks, and switches where there are some; they meet in the store. `channels`: at most."""
        self.rank, self._store = rank, store
        self.boxes = Mailboxes(rank, nodes, channels, store, timeout_s)
        self.number = self.generation = 0
        self.window = torch.empty(0, dtype=torch.uint8)
        self._windows: dict[tuple[int, int], Tensor] = {}  # of peers, by generation
        self._files: list[Path] = []
        self._unread: list[tuple[CollectiveStanding, Transfer, int]] = []  # of the last collective

    def run(self, schedule: CollectiveSchedule, tensor: Tensor, received: Tensor | None = None) -> None:
        """In place; see `homes`. All ranks call it with the same schedule."""
        if schedule.channels > self.boxes.channels:
            raise ConfigError(
                f"{schedule.name} has {schedule.channels} channels, and this player {self.boxes.channels} at most"
            )
        for standing, transfer, number in self._unread:
            self.boxes.wait_taken(standing, transfer, number)
        homes = Homes(schedule, self.rank, tensor, received)
        self.number += 1
        starts = self._grow(schedule, homes.whole.element_size())
        lanes = [
            _Lane(self, schedule, homes, channel, starts[channel]) for channel in range(schedule.channels)
        ]
        if len(lanes) == 1:
            lanes[0].play()
        else:
            with ThreadPoolExecutor(len(lanes)) as threads:
                for done in [threads.submit(lane.play) for lane in lanes]:
                    done.result()
        self._unread = [one for lane in lanes for some in lane.unread.values() for one in some]

    def _grow(self, schedule: CollectiveSchedule, element_size: int) -> list[int]:
        """Room for all that this rank sends. Where each channel's begins, if it is not the chunk's own place."""
        starts = [0] * schedule.channels
        if schedule.collective == "all_to_all":
            size = 0
            for channel in range(schedule.channels):
                starts[channel] = size
                for step in schedule.steps(self.rank, channel):
                    size += sum(schedule.elements(one) for one in step if one.move is Move.SEND)
        else:
            size = schedule.offsets[-1]
        if size * element_size > self.window.numel():
            self.generation += 1
            wanted = -(-size * element_size // 4096) * 4096
            try:
                path = shared_file("window", wanted)
                self._files.append(path)
                self.window = _mapped(path)
            except OSError as error:
                raise CollectiveFailed(
                    f"{schedule.name}: rank {self.rank} got no {quantity(wanted, 'B')} of memory to share, before "
                    f"step 1 ({error.strerror}): raise the memory limit, or take the transport tcp"
                ) from error
            self._store.set(f"collective window {self.rank} {self.generation}", str(path))
        return starts

    def window_of(self, peer: int, generation: int) -> Tensor:
        known = self._windows.get((peer, generation))
        if known is None:
            path = self._store.get(f"collective window {peer} {generation}").decode()
            known = self._windows[peer, generation] = _mapped(Path(path))
        return known

    def close(self) -> None:
        self.boxes.close()
        for path in self._files:
            forget_file(path)
        self._files.clear()


class _At(Enum):
    """Where a chunk's value is."""

    HOME = 0
    WINDOW = 1
    BOTH = 2


class _Lane:
    """One channel of one collective on this rank."""

    def __init__(
        self,
        player: SharedMemoryPlayer,
        schedule: CollectiveSchedule,
        homes: Homes,
        channel: int,
        start: int,
    ) -> None:
        self._player, self._schedule, self._homes, self._channel = player, schedule, homes, channel
        self._size = homes.whole.element_size()
        self._in_place = schedule.collective != "all_to_all"
        self._next = start  # in the window, where chunks have no place of their own
        count = player.window.numel() // self._size * self._size
        self._window = player.window[:count].view(homes.dtype)
        self._at: dict[int, _At] = {}  # else at home
        self.unread: dict[int, list[tuple[CollectiveStanding, Transfer, int]]] = {}  # sends of a chunk

    def play(self) -> None:
        schedule, rank = self._schedule, self._player.rank
        for index, step in enumerate(schedule.steps(rank, self._channel)):
            self._step(CollectiveStanding(schedule, rank, self._channel, index), step)
        for chunk, at in self._at.items():
            if at is _At.WINDOW:
                self._home(chunk).copy_(self._place(chunk))

    def _step(self, standing: CollectiveStanding, step: CollectiveStep) -> None:
        for transfer in step:
            if transfer.move is Move.SEND:
                self._send(standing, transfer)
        sums: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for transfer in step:
            if transfer.move is Move.REDUCE:
                part = self._arrived(standing, transfer)
                sums.setdefault((transfer.chunk, transfer.count), []).append((transfer.peer, part))
            elif transfer.move is Move.COPY:
                self._take(transfer, self._arrived(standing, transfer))
        for (chunk, count), parts in sums.items():
            self._add(chunk, count, parts)
            for peer, _ in parts:
                self._player.boxes.acknowledge(peer, self._channel)

    def _send(self, standing: CollectiveStanding, transfer: Transfer) -> None:
        player, start = self._player, self._next
        if self._in_place:
            start = self._schedule.offsets[transfer.chunk]
            for chunk, count, at in self._runs(transfer.chunk, transfer.count):
                if at is _At.HOME:
                    self._wait_read(chunk, count)
                    self._place(chunk, count).copy_(self._home(chunk, count))
                    self._set(chunk, count, _At.BOTH)
        else:
            for view in self._homes.views(transfer):
                self._window[self._next : self._next + view.numel()].copy_(view)
                self._next += view.numel()
        elements = self._schedule.elements(transfer)
        head = MessageHead(player.number, self._schedule.fingerprint, elements * self._size)
        number = player.boxes.post(standing, transfer, head, player.generation, start * self._size)
        for chunk in transfer.chunks:
            self.unread.setdefault(chunk, []).append((standing, transfer, number))

    def _arrived(self, standing: CollectiveStanding, transfer: Transfer) -> Tensor:
        said, generation, start = self._player.boxes.receive(standing, transfer)
        size = self._schedule.elements(transfer) * self._size
        want = MessageHead(self._player.number, self._schedule.fingerprint, size)
        if said != want:
            raise standing.differs(transfer, said, want)
        if not size:
            return self._window[:0]
        try:
            window = self._player.window_of(transfer.peer, generation)
        except OSError:
            raise standing.gone(transfer) from None
        return window[start : start + size].view(self._homes.dtype)

    def _take(self, transfer: Transfer, part: Tensor) -> None:
        for home in self._homes.views(transfer):
            home.copy_(part[: home.numel()])
            part = part[home.numel() :]
        self._player.boxes.acknowledge(transfer.peer, self._channel)
        if self._in_place:
            self._set(transfer.chunk, transfer.count, _At.HOME)
        self._homes.empty.difference_update(transfer.chunks)

    def _add(self, chunk: int, count: int, parts: list[tuple[int, Tensor]]) -> None:
        """In the order of ranks, into the place that nobody reads."""
        offsets, first = self._schedule.offsets, self._schedule.offsets[chunk]
        for start, length, at in self._runs(chunk, count):
            home, place = self._home(start, length), self._place(start, length)
            own = place if at is _At.WINDOW else home
            to_home = at is _At.WINDOW or any(self.unread.get(one) for one in range(start, start + length))
            target = home if to_home else place
            low, high = offsets[start] - first, offsets[start + length] - first
            values = [(peer, part[low:high]) for peer, part in parts]
            if start in self._homes.empty:
                self._homes.empty.difference_update(range(start, start + length))
            else:
                values.append((self._player.rank, own))
            _fold([value for _, value in sorted(values, key=lambda one: one[0])], own, target)
            self._set(start, length, _At.HOME if to_home else _At.WINDOW)

    def _runs(self, chunk: int, count: int) -> Iterator[tuple[int, int, _At]]:
        """Chunks that follow each other and whose values are at the same kind of place."""
        if count == 1:
            yield chunk, 1, self._at.get(chunk, _At.HOME)
            return

        def kind(one: int) -> tuple[_At, bool, bool]:
            return self._at.get(one, _At.HOME), bool(self.unread.get(one)), one in self._homes.empty

        for key, run in groupby(range(chunk, chunk + count), kind):
            some = list(run)
            yield some[0], len(some), key[0]

    def _wait_read(self, chunk: int, count: int) -> None:
        for one in range(chunk, chunk + count):
            for standing, transfer, number in self.unread.pop(one, ()):
                self._player.boxes.wait_taken(standing, transfer, number)

    def _set(self, chunk: int, count: int, at: _At) -> None:
        for one in range(chunk, chunk + count):
            self._at[one] = at

    def _home(self, chunk: int, count: int = 1) -> Tensor:
        offsets = self._schedule.offsets
        return self._homes.whole[offsets[chunk] : offsets[chunk + count]]

    def _place(self, chunk: int, count: int = 1) -> Tensor:
        offsets = self._schedule.offsets
        return self._window[offsets[chunk] : offsets[chunk + count]]


def _fold(values: list[Tensor], own: Tensor, target: Tensor) -> None:
    if len(values) == 1:
        target.copy_(values[0])
    elif len(values) == 2:
        add(values[0], values[1], target)
    else:
        total = torch.empty_like(target) if target is own else target
        add(values[0], values[1], total)
        for value in values[2:]:
            add(total, value, total)
        if total is not target:
            target.copy_(total)


def _mapped(path: Path) -> Tensor:
    with path.open("r+b") as file:
        # Its pages are here from the start: a collective must not wait for them.
        memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(memory, dtype=torch.uint8)
