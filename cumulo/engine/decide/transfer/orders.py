"""What engines with roles say to each other about a prompt, and where they are reached (`unix:PATH` on one host,
`tcp:HOST:PORT` between hosts): orders of the scheduler, and events that the players of transfers have seen. Plain
data.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cumulo.errors import CumuloError


class LayerPiece(NamedTuple):
    """Blocks that are copied at once: keys and values of some layers, from `sources` to `targets`."""

    layer: int  # the first
    layers: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]  # as many


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Says whose KV goes from which blocks to which. Layers in order, and within a layer blocks in order: what is
    computed first is copied first."""

    number: int  # of the order, which the receiver counts
    source: str  # the engine that computes
    layers: int
    block_size: int
    tokens: int  # computed there
    held_blocks: int  # the receiver has these already, by their hashes: they are not sent
    sources: tuple[int, ...]  # the sender's blocks of all tokens
    targets: tuple[int, ...]  # the receiver's, from `held_blocks` on

    @property
    def blocks(self) -> int:
        return len(self.targets)


class TransferProgress:
    """How far a transfer is: what the sender has computed, and what of it has been copied."""

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self._ready = [0] * plan.layers  # blocks that are complete at the source
        self._copied = [plan.held_blocks] * plan.layers

    def computed(self, layers: int, tokens: int) -> None:
        """The first `layers` layers have the KV of the first `tokens` tokens. A block is sent when it is full,
        the last one when everything is computed."""
        plan = self.plan
        blocks = len(plan.sources) if tokens >= plan.tokens else tokens // plan.block_size
        for layer in range(layers):
            if blocks > self._ready[layer]:
                self._ready[layer] = blocks

    def next_piece(self, most_blocks: int, most_layers: int = 1) -> LayerPiece | None:
        """What to copy now, or None until more has been computed. `most_blocks`: of all layers together."""
        plan, held = self.plan, self.plan.held_blocks
        for layer in range(plan.layers):
            ready, copied = self._ready[layer], self._copied[layer]
            if copied < ready:
                layers = self._alike(layer, min(most_layers, max(1, most_blocks // (ready - copied))))
                end = min(ready, copied + most_blocks)
                self._copied[layer : layer + layers] = [end] * layers
                return LayerPiece(
                    layer, layers, plan.sources[copied:end], plan.targets[copied - held : end - held]
                )
        return None

    def _alike(self, layer: int, most: int) -> int:
        """How many layers from this one on are as far, here and there."""
        end = min(layer + most, self.plan.layers)
        state = self._ready[layer], self._copied[layer]
        for other in range(layer + 1, end):
            if (self._ready[other], self._copied[other]) != state:
                return other - layer
        return end - layer

    @property
    def complete_blocks(self) -> int:
        """Blocks of the sequence, from its first, that are here in all layers."""
        return min(self._copied)

    @property
    def done(self) -> bool:
        return self.complete_blocks == len(self.plan.sources)


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
    """An order of a decode engine to a prefill engine: compute these tokens and keep their blocks until
    released."""

    number: int
    peer: str
    tokens: "array[int]"
    request_id: str = ""
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    adapter: str = ""  # its fingerprint: the prefill engine may have it under another name


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


class SenderEvent(NamedTuple):
    """To a prefill engine: a receiver's order, under a key of its own."""

    key: str
    order: ComputeOrder | None  # None: the receiver has all it wants of it, or is gone


Order = ComputeOrder | TransferPlan | ReleaseOrder  # a plan: copy as the sender computes
Answer = tuple[str, OrderBegun | OrderFailed]  # of a prefill engine: the order's key, and the news
ReceiverEvent = OrderBegun | CopyMoved | Landed | CopyStopped | OrderFailed | PeerLoad | PeerLost
