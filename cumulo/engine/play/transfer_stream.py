"""KV over a stream socket, between hosts or on one: staged through host memory, a page at a time, while the next
one is copied. On GPUs pages are locked, and copies run on streams of their own, beside the engine's steps.

Both ends have two pages. The sender fills one while the other leaves through the socket; the receiver empties one
while the other fills from it.
"""

import contextlib
import itertools
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from cumulo.engine.decide.transfer.orders import LayerPiece
from cumulo.engine.play.transfer_cuda import words_by_rank
from cumulo.engine.play.transfer_wire import SentCache, open_socket

_ASK = struct.Struct("<II")  # a request for blocks: layer, number of runs; then source and blocks of each
PAGE_BYTES = 4 << 20
_PAGES = 2
_LAYERS_AHEAD = 4  # asked for before the first of them has come


class _Page:
    """Host memory, and the moments from which the copies to or from it have ended."""

    def __init__(self, size: int, page_locked: bool) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=page_locked)
        self.view = self.tensor.numpy().data
        self.used = 0
        self._ends: list[torch.cuda.Event] = []

    def begin(self) -> "_Page":
        self.used = 0
        return self

    def copied_by(self, streams: Iterable["torch.cuda.Stream"]) -> None:
        """What these have been given so far is the last that touches it."""
        self._ends = [stream.record_event() for stream in streams]

    def wait(self) -> None:
        for end in self._ends:
            end.synchronize()
        self._ends = []


class _CacheBytes:
    """The KV of all ranks of an engine as bytes, and the streams that copy it. Without a GPU, copies are done when
    they return."""

    def __init__(self, cache: SentCache) -> None:
        # [layers, blocks, bytes] each
        self.storages = [one.view(torch.uint8) for rank in words_by_rank(cache) for one in rank]
        self.blocks = self.storages[0].shape[1]
        devices = {one.device for one in self.storages if one.is_cuda}
        self.streams = {device: torch.cuda.Stream(device) for device in devices}

    def pages(self) -> list[_Page]:
        return [_Page(PAGE_BYTES, bool(self.streams)) for _ in range(_PAGES)]

    def pieces(self, layer: int, runs: Iterable[tuple[int, int]]) -> list[Tensor]:
        """The bytes of runs (first block, blocks) of a layer, in the order in which they travel."""
        listed = list(runs)
        if any(first < 0 or first + count > self.blocks for first, count in listed):
            raise OSError("a transfer names KV blocks that do not exist")
        return [
            side[layer, first : first + count].view(-1) for side in self.storages for first, count in listed
        ]

    def copy(self, target: Tensor, source: Tensor) -> None:
        device = target.device if target.is_cuda else source.device
        with torch.cuda.stream(self.streams[device]) if device.type == "cuda" else contextlib.nullcontext():
            target.copy_(source, non_blocking=True)


class StreamExport:
    """The sender's end."""

    name = "stream"

    def __init__(self, cache: SentCache) -> None:
        self._cache = _CacheBytes(cache)

    def reach(self) -> dict[str, Any]:
        return {"blocks": self._cache.blocks}

    def serve(self, connection: socket.socket) -> None:
        """Answer requests for blocks until the receiver is gone. A thread of its own runs this."""
        empty = itertools.cycle(self._cache.pages())
        with connection, contextlib.suppress(OSError):  # of nonsense, the receiver sees the connection's end
            while (head := _receive_exactly(connection, _ASK.size)) is not None:
                layer, count = _ASK.unpack(head)
                if count > self._cache.blocks:
                    return
                asked = _receive_exactly(connection, count * _ASK.size)
                if asked is None:
                    return
                pages = self._staged(self._cache.pieces(layer, _ASK.iter_unpack(asked)), empty)
                page = next(pages, None)
                while page is not None:
                    following = next(pages, None)  # is filled while this one leaves
                    page.wait()
                    connection.sendall(page.view[: page.used])
                    page = following

    def _staged(self, pieces: list[Tensor], empty: Iterator[_Page]) -> Iterator[_Page]:
        """The bytes of all pieces, a page at a time; copies into it may not have ended."""
        page = next(empty).begin()
        for piece in pieces:
            begin = 0
            while begin < len(piece):
                end = min(len(piece), begin + PAGE_BYTES - page.used)
                self._cache.copy(page.tensor[page.used : page.used + end - begin], piece[begin:end])
                page.used, begin = page.used + end - begin, end
                if page.used == PAGE_BYTES:
                    page.copied_by(self._cache.streams.values())
                    yield page
                    page = next(empty).begin()
        if page.used:
            page.copied_by(self._cache.streams.values())
            yield page


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    """Receive so many bytes; None at the end of the stream."""
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


def joined(piece: LayerPiece) -> list[tuple[int, int, int]]:
    """Blocks that follow one another in both caches in one run: its first source and target, and how many."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(piece.sources, piece.targets, strict=True):
        first, to, blocks = runs[-1] if runs else (0, 0, 0)
        if blocks and source == first + blocks and target == to + blocks:
            runs[-1] = first, to, blocks + 1
        else:
            runs.append((source, target, 1))
    return runs


class StreamSource:
    """The receiver's end."""

    turn_bytes, turn_layers = 32 << 20, _LAYERS_AHEAD

    def __init__(self, cache: SentCache, address: str, greeting: bytes) -> None:
        self._cache = _CacheBytes(cache)
        self._pages, self._turn = self._cache.pages(), 0
        self._socket, where = open_socket(address)
        self._socket.settimeout(30.0)
        self._socket.connect(where)
        self._socket.sendall(greeting)

    def read(self, piece: LayerPiece) -> int:
        """Received; it is on the device when it is settled. All layers are asked for first, so that the sender
        stages the next one while this one is under way."""
        runs, layers = joined(piece), range(piece.layer, piece.layer + piece.layers)
        targets = [(target, blocks) for _, target, blocks in runs]
        places = [self._cache.pieces(layer, targets) for layer in layers]
        asked = b"".join(_ASK.pack(source, blocks) for source, _, blocks in runs)
        for layer in layers:
            self._socket.sendall(_ASK.pack(layer, len(runs)) + asked)
        return sum(map(self._receive, places))

    def _receive(self, pieces: list[Tensor]) -> int:
        left = total = sum(len(piece) for piece in pieces)
        index = begin = 0  # the piece that comes next, and from where on
        while left:
            page, size = self._pages[self._turn], min(left, PAGE_BYTES)
            self._turn = (self._turn + 1) % _PAGES
            page.wait()
            self._fill(page.view[:size])
            used = 0
            while used < size:
                piece = pieces[index]
                count = min(size - used, len(piece) - begin)
                self._cache.copy(piece[begin : begin + count], page.tensor[used : used + count])
                used, begin = used + count, begin + count
                if begin == len(piece):
                    index, begin = index + 1, 0
            page.copied_by(self._cache.streams.values())
            left -= size
        return total

    def _fill(self, view: memoryview) -> None:
        while len(view):
            got = self._socket.recv_into(view)
            if not got:
                raise ConnectionError("the sender closed the connection in mid-transfer")
            view = view[got:]

    def settle(self) -> None:
        for page in self._pages:
            page.wait()

    def close(self) -> None:
        self._socket.close()
