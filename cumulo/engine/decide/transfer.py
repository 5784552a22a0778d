"""Transfer: which engine computes a prompt, which KV blocks travel from it, and in what order. With split roles the
scheduler of a decode engine asks here; `handover.py` carries the answers into its books.

A decode engine that is given a long prompt orders its KV from a prefill engine. That one computes all known tokens
but the last and draws nothing; the decode engine copies the blocks layer by layer while later layers are computed,
computes the last token itself and draws. So nothing that was sampled has to travel, and an order that fails costs
time and no state: the prompt is computed again wherever that is predicted to be cheapest.
"""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.request import Sequence
from cumulo.engine.decide.routing import Ask, PrefixAware, ReplicaView, expected, held_tokens

MOST_ORDERS = 3  # of one request: after so many failures its prompt is computed where it waits
LOAD_EVERY_S = 0.25  # between two PeerLoads of a prefill engine


# -- what travels, and in which order -------------------------------------------------------------------------
class BlockRun(NamedTuple):
    """Blocks that follow one another in both caches: one copy."""

    source: int
    target: int
    blocks: int


class LayerPiece(NamedTuple):
    """What is copied at once: runs of blocks of one layer, keys and values."""

    layer: int
    runs: list[BlockRun]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Whose KV goes from which blocks to which. Layers in order, and within a layer blocks in order: what is
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

    def runs(self, first: int, end: int) -> list[BlockRun]:
        """Blocks [first, end) of the sequence, neighbours joined."""
        found: list[BlockRun] = []
        for index in range(first, end):
            source, target = self.sources[index], self.targets[index - self.held_blocks]
            last = found[-1] if found else None
            if last is not None and (last.source + last.blocks, last.target + last.blocks) == (
                source,
                target,
            ):
                found[-1] = last._replace(blocks=last.blocks + 1)
            else:
                found.append(BlockRun(source, target, 1))
        return found


class TransferProgress:
    """How far a transfer is: what the sender has computed, and what of it has been copied."""

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self._ready = [0] * plan.layers  # blocks that are complete at the source
        self._copied = [plan.held_blocks] * plan.layers

    def computed(self, layers: int, tokens: int) -> None:
        """The first `layers` layers have the KV of the first `tokens` tokens. A block is sent when it is full, the
        last one when everything is computed."""
        plan = self.plan
        blocks = len(plan.sources) if tokens >= plan.tokens else tokens // plan.block_size
        for layer in range(layers):
            if blocks > self._ready[layer]:
                self._ready[layer] = blocks

    def next_piece(self, most_blocks: int) -> LayerPiece | None:
        """What to copy now, or None until more has been computed."""
        for layer, (ready, copied) in enumerate(zip(self._ready, self._copied, strict=True)):
            if copied < ready:
                end = min(ready, copied + most_blocks)
                self._copied[layer] = end
                return LayerPiece(layer, self.plan.runs(copied, end))
        return None

    @property
    def complete_blocks(self) -> int:
        """Blocks of the sequence, from its first, that are here in all layers."""
        return min(self._copied)

    @property
    def done(self) -> bool:
        return self.complete_blocks == len(self.plan.sources)


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
    prompt_tok_s: float
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


# -- where a prompt is computed --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PrefillChoice:
    peer: str | None  # None: here
    here_s: float  # predicted delays in all
    there_s: float
    why: str


def why_whole(params: SamplingParams, tokens: int) -> str | None:
    """What keeps a request from being split, in words; None if nothing does."""
    if params.pooling is not None:
        return "an embedding needs the hidden states of its tokens, and only KV is sent"
    if params.prompt_logprobs is not None:
        return "prompt log-probabilities need every token's logits, and only KV is sent"
    return "there is one token to compute" if tokens < 2 else None


def choose_prefill(
    ask: Ask, here: ReplicaView, peers: ListLike[ReplicaView], tail_s: float, router: PrefixAware
) -> PrefillChoice:
    """The least sum of delays. Elsewhere: the queue there, the prompt, and what of the transfer is left when its
    last layer is computed. Here: the queue and the prompt, for which every running sequence waits, too; an engine
    that runs nothing counts one, because somebody will come."""
    missing = ask.prompt_tokens - held_tokens(ask, here)
    compute_s = missing / here.prompt_tok_s
    here_s = here.waiting_tokens / here.prompt_tok_s + compute_s * (1 + max(1, here.running))
    if not peers:
        return PrefillChoice(None, here_s, float("inf"), "no prefill engine can be reached")
    there_s = tail_s + min(expected(ask, one, router.promised.get(one.name, ())).ttft_s for one in peers)
    words = f"({_ms(there_s)} against {_ms(here_s)})"
    if here_s <= there_s:
        return PrefillChoice(None, here_s, there_s, f"{missing} tokens are computed sooner here {words}")
    chosen = router.route(ask, peers)
    return PrefillChoice(
        chosen.replica, here_s, there_s, f"that delays everybody less than computing it here {words}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


# -- what is under way -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class Incoming:
    """An order of a decode engine, from when it is sent until nothing writes into its blocks any more."""

    number: int
    sequence: Sequence
    peer: str
    tokens: int
    asked_s: float
    heard_s: float
    failed_at: frozenset[str] = frozenset()
    begun: OrderBegun | None = None
    plan: TransferPlan | None = None
    blocks: list[int] = field(default_factory=list)  # given up, but perhaps still written to
    over: bool = False  # released: waits for CopyStopped
    told: bool = False  # the prefill engine has said how long it took


@dataclass(slots=True)
class Outgoing:
    """What a prefill engine holds for a receiver: its own references to the blocks."""

    sequence: Sequence
    number: int
    blocks: list[int] = field(default_factory=list)
    released: bool = False


@dataclass(slots=True)
class Peer:
    load: PeerLoad
    heard_s: float


class Transfers:
    """All transfers of one engine. Owned by the scheduler's books; changed by `handover.py`."""

    def __init__(self, layers: int = 0, stall_s: float = 10.0) -> None:
        self.layers, self.stall_s = layers, stall_s
        self.receives = False  # a decode engine
        self.peers: dict[str, Peer] = {}  # prefill engines that were heard of lately
        self.incoming: dict[int, Incoming] = {}
        self.of_request: dict[str, Incoming] = {}  # the one that is not over
        self.outgoing: dict[str, Outgoing] = {}
        self.landed_first: dict[int, Sequence] = {}  # whose prefill engine has not said yet how long it took
        self.orders: list[Order] = []  # the engine takes them
        self.fetches: list[tuple[int, FetchOrder]] = []  # ... later: when this step has run
        self.answers: list[Answer] = []
        self.tail_s = 2e-3  # learnt: from the last layer's end to the last block's arrival
        self.copied_bytes = 0
        self.copying_s = 0.0
        self.landed = self.failed = 0
        self.heard = 0  # events: a decode engine that waits for others is alive as long as it hears of them
        self.router = PrefixAware()
        self._numbers = 0

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    @property
    def active(self) -> bool:
        return bool(self.incoming or self.outgoing)

    def release(self, incoming: Incoming) -> None:
        """Its blocks are here, or no longer wanted."""
        self.orders.append(ReleaseOrder(incoming.number, incoming.peer))
        del self.of_request[incoming.sequence.request.id]

    def give_up(self, incoming: Incoming) -> int:
        """Release an order before all has arrived. Blocks stay its own until nothing writes into them any more;
        returns the slot that the sequence had, or -1."""
        sequence = incoming.sequence
        self.release(incoming)
        if incoming.plan is None:
            del self.incoming[incoming.number]
        else:
            incoming.over, incoming.blocks = True, sequence.blocks
            sequence.blocks, sequence.capacity, sequence.computed = [], 0, 0
        slot, sequence.slot = sequence.slot, -1
        return slot

    def answer(self, sequence: Sequence, now_s: float) -> None:
        """A prefill engine's order has been computed, or has failed."""
        request = sequence.request
        outgoing = self.outgoing.get(request.id)
        if outgoing is None:
            return  # the receiver wants it no more
        if request.error is not None:
            self.answers.append((request.id, OrderFailed(outgoing.number, request.error)))
        else:
            queued_s = request.story.queue_s or 0.0
            computed_s = now_s - request.story.arrived_s - queued_s
            self.answers.append((request.id, OrderComputed(outgoing.number, queued_s, computed_s)))
        if outgoing.released:
            del self.outgoing[request.id]

    def views(self, avoid: frozenset[str], block_size: int) -> list[ReplicaView]:
        """Prefill engines as a router sees them, with what was ordered since they last spoke."""
        ordered: Mapping[str, int] = {
            name: sum(
                one.tokens
                for one in self.incoming.values()
                if one.peer == name and one.begun is None and not one.over and one.asked_s > peer.heard_s
            )
            for name, peer in self.peers.items()
        }
        return [
            ReplicaView(
                name,
                waiting_tokens=peer.load.waiting_tokens + ordered[name],
                running=peer.load.running,
                max_running=peer.load.max_running,
                prompt_tok_s=peer.load.prompt_tok_s,
                step_s=0.0,  # nothing is drawn there
                block_size=block_size,
            )
            for name, peer in self.peers.items()
            if name not in avoid
        ]

    def stalled(self, now_s: float) -> list[tuple[Incoming, str]]:
        """Transfers that have not moved for too long, though their engine lives."""
        late_s = now_s - self.stall_s
        return [
            (one, f"nothing arrived for {self.stall_s:g} s")
            for one in self.incoming.values()
            if one.plan is not None and not one.over and one.heard_s < late_s
        ]

    def silent(self, now_s: float) -> list[str]:
        """Prefill engines that have said nothing for too long."""
        return [name for name, peer in self.peers.items() if peer.heard_s < now_s - self.stall_s]

    def learn(self, landed: Landed) -> None:
        self.landed += 1
        self.tail_s += 0.2 * (landed.tail_s - self.tail_s)
        self.copied_bytes += landed.copied_bytes
        self.copying_s += landed.copying_s
