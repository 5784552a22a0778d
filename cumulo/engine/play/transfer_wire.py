"""The words of two engines that hand KV over: orders and news as frames on a stream socket. Used by both ends.

A frame is its length, its kind and a body of JSON.
"""

import json
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cumulo.engine.decide.transfer.orders import (
    ComputeOrder,
    OrderBegun,
    OrderFailed,
    PeerLoad,
    ReleaseOrder,
    parse_address,
)
from cumulo.errors import CumuloError
from cumulo.models.batch import KVCache

_HEAD = struct.Struct("<IB")
LONGEST = 64 << 20
_LONGEST_GREETING = 1 << 16
# Of an engine that is gone, or that says what makes no sense.
BROKEN = (OSError, CumuloError, ValueError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class LayersDone:
    """The first `layers` layers have the KV of the first `tokens` tokens of an order."""

    number: int
    layers: int
    tokens: int


class RankCaches:
    """The KV of all ranks of an engine, each with its own heads of the same blocks: sent and received as one."""

    def __init__(self, ranks: Sequence[KVCache], handles: Sequence[str] = ()) -> None:
        """`handles`: on GPUs, how each rank's is opened; `ranks` is then this process's alone."""
        self.ranks, first = list(ranks), ranks[0]
        self.handles, self.size = list(handles), len(handles) or len(ranks)
        self.spec, self.blocks, self.block_size = first.spec, first.blocks, first.block_size
        self.key_storage, self.value_storage = first.key_storage, first.value_storage


SentCache = KVCache | RankCaches


@dataclass(frozen=True, slots=True)
class Greeting:
    """The message with which both ends begin: what must be alike, and (of the sender) how its cache is
    reached."""

    model: str
    version: str
    block_bytes: tuple[int, int]  # of one block of one layer: keys, values
    layers: int
    block_size: int
    dtype: str
    tp: int = 1  # ranks that hold parts of each block
    key: str = ""  # the fleet's, of the receiver
    transport: str = ""
    reach: dict[str, Any] | None = None
    refusal: str = ""

    def differs_from(self, other: "Greeting") -> str:
        """What keeps the two engines from sharing KV, in words; empty if nothing does."""
        for name in ("version", "model", "tp", "layers", "block_size", "dtype", "block_bytes"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                what = name.replace("_", " ")
                return f"its {what} is {theirs}, here it is {mine}: start both engines with the same {what}"
        return ""


Word = Greeting | ComputeOrder | ReleaseOrder | OrderBegun | OrderFailed | PeerLoad | LayersDone
_KINDS: list[type[Word]] = [
    Greeting, ComputeOrder, ReleaseOrder, OrderBegun, OrderFailed, PeerLoad, LayersDone,
]  # fmt: skip


def greeting_of(cache: SentCache, model: str) -> Greeting:
    from cumulo import __version__  # late: the package's own file imports the engine

    blocks = cache.spec.layers * cache.blocks
    return Greeting(
        model=model,
        version=__version__,
        block_bytes=(cache.key_storage.nbytes // blocks, cache.value_storage.nbytes // blocks),
        layers=cache.spec.layers,
        block_size=cache.block_size,
        dtype=str(cache.key_storage.dtype).removeprefix("torch."),
        tp=cache.size if isinstance(cache, RankCaches) else 1,
    )


def pack(word: Word) -> bytes:
    body = json.dumps(asdict(word), default=list).encode()
    return _HEAD.pack(len(body), _KINDS.index(type(word))) + body


def _unpack(kind: int, body: bytes) -> Word:
    fields = dict(json.loads(body))
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = array("i", value) if name == "tokens" else tuple(value)
    return _KINDS[kind](**fields)


class WordReader:
    """Frames out of a stream, however it was cut. Until its owner trusts the other engine, they are short."""

    def __init__(self) -> None:
        self._buffer, self.longest = bytearray(), _LONGEST_GREETING

    def feed(self, data: bytes) -> Iterator[Word]:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(buffer)
            if length > self.longest or kind >= len(_KINDS):
                raise CumuloError("the other engine does not speak the words of KV transfer")
            if len(buffer) < _HEAD.size + length:
                return
            body = bytes(buffer[_HEAD.size : _HEAD.size + length])
            del buffer[: _HEAD.size + length]
            yield _unpack(kind, body)


def open_socket(address: str) -> tuple[socket.socket, Any]:
    """A stream socket for `unix:PATH` or `tcp:HOST:PORT`, and the address as the socket module wants it."""
    where = parse_address(address)
    if isinstance(where, str):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), where
    made = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made, where
