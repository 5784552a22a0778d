"""What engines with roles say to each other about a prompt, and where they are reached (`unix:PATH` on one host,
`tcp:HOST:PORT` between hosts): orders of the scheduler, and events that the players of transfers have seen. Plain
data.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cumulo.engine.decide.transfer.travel import TransferPlan
from cumulo.errors import CumuloError

Address = str | tuple[str, int]  # a path, or a host and its port
_LONGEST_PATH = 107  # what Linux takes


def parse_address(text: str) -> Address:
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and len(rest.encode()) > _LONGEST_PATH:
        raise CumuloError(
            f"the path of a socket has up to {_LONGEST_PATH} bytes, and {text!r} has {len(rest.encode())}: choose "
            "a shorter one"
        )
    if scheme == "unix" and rest:
        return rest
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdigit() and int(port) < 1 << 16:
        return host.strip("[]"), int(port)
    raise CumuloError(f"an engine's transfer address is unix:PATH or tcp:HOST:PORT; got {text!r}")


def named_address(text: str, number: int) -> tuple[str, str]:
    """Of `NAME=ADDRESS`, or of an address alone, a prefill engine's name and address."""
    name, equals, address = text.partition("=")
    return (name, address) if equals else (f"prefill-{number}", text)


def named_addresses(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Of all prefill engines, each with a name and an address of its own."""
    found = [named_address(text, number) for number, text in enumerate(texts)]
    for what, values in (("name", [name for name, _ in found]), ("address", [where for _, where in found])):
        twice = next((one for one in values if values.count(one) > 1), None)
        if twice is not None:
            raise CumuloError(f"two prefill engines have the {what} {twice!r}: give each its own {what}")
    return found


LOAD_EVERY_S = 0.25  # between two PeerLoads of a prefill engine


# -- orders: what the scheduler wants done ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ComputeOrder:
    """Of a decode engine to a prefill engine: compute these tokens and keep their blocks until released."""

    number: int
    peer: str
    tokens: "array[int]"
    request_id: str = ""
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    adapter: str = ""  # its fingerprint: the prefill engine may have it under another name


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Copy as the sender computes."""

    plan: TransferPlan


@dataclass(frozen=True, slots=True)
class ReleaseOrder:
    """The blocks are here, or no longer wanted: stop copying, and tell the sender."""

    number: int
    peer: str


# -- events: what the player of transfers has seen -------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class OrderBegun:
    """A prefill engine has admitted an order: from now on it computes into these blocks."""

    number: int
    blocks: tuple[int, ...]
    cached_tokens: int  # which it had in its prefix cache
    peer: str = ""


@dataclass(frozen=True, slots=True)
class OrderComputed:
    """A prefill engine has computed all of an order."""

    number: int
    queued_s: float
    computed_s: float
    peer: str = ""


@dataclass(frozen=True, slots=True)
class CopyMoved:
    """Something of this transfer has been copied."""

    number: int


@dataclass(frozen=True, slots=True)
class Landed:
    """All blocks are here."""

    number: int
    tail_s: float  # after the last layer was computed
    copied_bytes: int
    copying_s: float


@dataclass(frozen=True, slots=True)
class CopyStopped:
    """Nothing writes into this transfer's blocks any more, as was asked."""

    number: int
    complete_blocks: int


@dataclass(frozen=True, slots=True)
class OrderFailed:
    """The prefill engine cannot compute an order."""

    number: int
    why: str
    peer: str = ""


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """A prefill engine's word about itself, a few times a second while its loop turns."""

    waiting_tokens: int
    running: int
    prompt_tok_s: float  # 0: not measured yet
    max_running: int
    peer: str = ""


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class Released:
    """To a prefill engine: a receiver has all it wants of an order, or is gone."""

    key: str


@dataclass(frozen=True, slots=True)
class Ordered:
    """To a prefill engine: a receiver's order, under a key of its own."""

    key: str
    order: ComputeOrder


Order = ComputeOrder | FetchOrder | ReleaseOrder
Answer = tuple[
    str, OrderBegun | OrderComputed | OrderFailed
]  # of a prefill engine: the order's key, and the news
ReceiverEvent = (
    OrderBegun | OrderComputed | CopyMoved | Landed | CopyStopped | OrderFailed | PeerLoad | PeerLost
)
SenderEvent = Ordered | Released
