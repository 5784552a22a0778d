"""Transfers: what an engine with a role has under way, and where the next prompt is computed: here, or by which
prefill engine. Owned and changed by `handover.py`.
"""

import itertools
from collections import Counter
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple

from cumulo.engine.decide.core.request import Sequence
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.routing import Ask, PrefixAware, ReplicaView, expected, held_tokens
from cumulo.engine.decide.transfer.orders import (
    Answer,
    FetchOrder,
    Landed,
    Order,
    OrderBegun,
    OrderComputed,
    OrderFailed,
    PeerLoad,
    ReleaseOrder,
    TransferPlan,
)


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
    """All transfers of one engine. Owned and changed by `handover.py`."""

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
        self.learnt_tail_s = 2e-3  # from the last layer's end to the last block's arrival
        # In what was measured of prefill engines. It falls with every prompt that none is asked for: else one slow
        # moment, of an engine or of a link, would be believed for ever, because nothing new is measured.
        self.trust = 1.0
        self.copied_bytes = 0
        self.copying_s = 0.0
        self.landed = self.failed = 0
        self.heard = 0  # events: a decode engine that waits for others is alive as long as it hears of them
        self.router = PrefixAware()
        self.numbers = itertools.count(1)  # of orders

    @property
    def tail_s(self) -> float:
        return self.learnt_tail_s * self.trust

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

    def views(self, avoid: frozenset[str], block_size: int, usual_tok_s: float) -> list[ReplicaView]:
        """Prefill engines as a router sees them, with what was ordered since they last spoke. One that has computed
        nothing yet has the usual speed, and so has by and by one that is never asked."""
        ordered = Counter[str]()
        for one in self.incoming.values():
            if one.peer in self.peers and one.begun is None and not one.over:
                ordered[one.peer] += one.tokens if one.asked_s > self.peers[one.peer].heard_s else 0
        found = []
        for name, peer in self.peers.items():
            measured = peer.load.prompt_tok_s or usual_tok_s
            if name not in avoid:
                found.append(
                    ReplicaView(
                        name,
                        waiting_tokens=peer.load.waiting_tokens + ordered[name],
                        running=peer.load.running,
                        max_running=peer.load.max_running,
                        prompt_tok_s=usual_tok_s + (measured - usual_tok_s) * self.trust,
                        step_s=0.0,  # nothing is drawn there
                        block_size=block_size,
                    )
                )
        return found

    def learn(self, landed: Landed) -> None:
        self.landed += 1
        self.trust = 1.0
        self.learnt_tail_s += 0.2 * (landed.tail_s - self.learnt_tail_s)
        self.copied_bytes += landed.copied_bytes
        self.copying_s += landed.copying_s


MOST_ORDERS = 3  # of one request: after so many failures its prompt is computed where it waits


class PrefillChoice(NamedTuple):
    peer: str | None  # None: here
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
        return PrefillChoice(None, "no prefill engine can be reached")
    there_s = tail_s + min(expected(ask, one, router.promised.get(one.name, ())).ttft_s for one in peers)
    words = f"({_ms(there_s)} against {_ms(here_s)})"
    if here_s <= there_s:
        return PrefillChoice(None, f"{missing} tokens are computed sooner here {words}")
    why = f"that delays everybody less than computing it here {words}"
    return PrefillChoice(router.route(ask, peers).replica, why)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
