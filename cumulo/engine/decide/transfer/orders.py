"""What engines with roles say to each other about a prompt: orders of the scheduler, and events that the players of
transfers have seen. Plain data."""

from array import array
from dataclasses import dataclass

from cumulo.engine.decide.transfer.travel import TransferPlan

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
