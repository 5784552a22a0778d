"""Transfers: what a decode engine has ordered from prefill engines, and what that changes in its scheduler, as an
extension of it. What is decided is told in the stories of the requests.

A request is parked while another engine computes its prompt, waits in the queue for a slot and blocks once that has
begun, and holds them while the KV arrives (`State.RECEIVING`). Blocks that a transfer may still write to are never
given to anybody else, whatever has become of the request.
"""

import itertools
from collections import Counter
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple

from cumulo.engine.decide.adapters import AdapterSlots
from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight
from cumulo.engine.decide.core.kv_manager import new_slot
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.routing import Ask, PrefixAware, ReplicaView, expected, held_tokens
from cumulo.engine.decide.transfer.orders import (
    ComputeOrder,
    CopyStopped,
    Landed,
    Order,
    OrderBegun,
    OrderFailed,
    PeerLoad,
    PeerLost,
    ReceiverEvent,
    ReleaseOrder,
    TransferPlan,
)

_MOST_ORDERS = 3  # of one request: after so many failures its prompt is computed where it waits


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


@dataclass(slots=True)
class Peer:
    load: PeerLoad
    heard_s: float


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


class Transfers(Extension):
    def __init__(self, batch: RequestBatch, adapters: AdapterSlots) -> None:
        self._batch, self._adapters = batch, adapters
        self.layers, self.stall_s = 0, 10.0
        self.receives = False  # a decode engine
        self.peers: dict[str, Peer] = {}  # prefill engines that were heard of lately
        self.incoming: dict[int, Incoming] = {}
        self.of_request: dict[str, Incoming] = {}  # the one that is not over
        self.orders: list[Order] = []  # the engine takes them
        self.fetches: list[tuple[int, TransferPlan]] = []  # ... later: when this step has run
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

    def receive(self, layers: int, stall_s: float) -> None:
        """This is a decode engine: prompts are computed elsewhere where that is sooner."""
        self.receives, self.layers, self.stall_s = True, layers, stall_s
        self._batch.kv.written_by_others = True

    # -- the points of a step -----------------------------------------------------------------------------
    def hold_back(self, sequence: Sequence, now_s: float) -> bool:
        return self.receives and self.order_prefill(sequence, now_s)

    def begin_step(self, plan: StepPlan, now_s: float) -> None:
        """Transfers that stand still, and engines that do, are not waited for."""
        if not self.receives:
            return
        stall_s = self.stall_s
        for name in [name for name, peer in self.peers.items() if peer.heard_s < now_s - stall_s]:
            self.enter_event(PeerLost(name, f"it said nothing for {stall_s:g} s"), now_s)
        for one in list(self.incoming.values()):
            if one.plan is not None and not one.over and one.heard_s < now_s - stall_s:
                self.fail_order(one, f"nothing arrived for {stall_s:g} s", now_s)

    def take_admission(self, sequence: Sequence, plan: StepPlan, now_s: float) -> bool:
        incoming = self.of_request.get(sequence.request.id)
        return incoming is not None and self._reserve(sequence, incoming, plan.index, now_s)

    def end_step(self, plan: StepPlan, flight: Flight, now_s: float) -> None:
        if not flight.rows:
            self.issue_fetches(now_s)

    def after_result(self, plan: StepPlan, flight: Flight, result: StepResult, now_s: float) -> None:
        self.issue_fetches(now_s)

    def step_failed(self, plan: StepPlan, now_s: float) -> None:
        self.issue_fetches(now_s)

    def sequence_ended(self, sequence: Sequence, now_s: float) -> None:
        incoming = self.of_request.get(sequence.request.id)
        if incoming is not None:
            self._give_up(incoming)

    # -- a decode engine orders ------------------------------------------------------------------------------------
    def order_prefill(
        self, sequence: Sequence, now_s: float, failed_at: frozenset[str] = frozenset()
    ) -> bool:
        """Decide where a waiting sequence's tokens are computed; True: elsewhere, and it is ordered."""
        request = sequence.request
        tokens = len(sequence.tokens) - 1
        obstacle = why_whole(request.params, len(sequence.tokens))
        if obstacle is None and len(request.sequences) > 1:
            obstacle = "several samples of it are continued, and each would need its own KV"
        if obstacle is None and len(failed_at) >= _MOST_ORDERS:
            obstacle = f"{len(failed_at)} prefill engines have failed it"
        if obstacle is not None:
            request.story.add(now_s, "prefill_here", why=obstacle)
            return False
        hashes = sequence.extend_hashes(
            tokens // self._batch.config.block_size, self._batch.config.block_size
        )
        ask = Ask(tokens, hashes)
        here = self._view()
        peers = self.views(failed_at, self._batch.config.block_size, here.prompt_tok_s)
        choice = choose_prefill(ask, here, peers, self.tail_s, self.router)
        if choice.peer is None:
            self.trust *= 0.9
            request.story.add(now_s, "prefill_here", why=choice.why)
            return False
        number = next(self.numbers)
        incoming = Incoming(number, sequence, choice.peer, tokens, now_s, now_s, failed_at)
        self.incoming[number] = self.of_request[request.id] = incoming
        adapter = "" if request.adapter < 0 else self._adapters.in_slot(request.adapter).fingerprint
        self.orders.append(
            ComputeOrder(
                number, choice.peer, sequence.tokens[:tokens], request.id, request.cache_salt, request.tenant,
                request.priority, adapter,
            )
        )  # fmt: skip
        request.story.add(now_s, "prefill_there", peer=choice.peer, tokens=tokens, why=choice.why)
        request.story.wait_for(now_s, "prefill")
        return True

    def _view(self) -> ReplicaView:
        """This engine as a router sees it. Prompts computed elsewhere are no work here. Engines of a fleet are
        alike: one that has computed no prompt yet is as fast as the others."""
        config, costs = self._batch.config, self._batch.kv.costs
        measured = [peer.load.prompt_tok_s for peer in self.peers.values()]
        if costs.knows_prompts or not any(measured):
            measured.append(1.0 / costs.prompt_s_per_token)
        waiting = sum(
            one.to_compute
            for request in self._batch.requests.values()
            for one in request.sequences
            if one.state != State.FINISHED and request.id not in self.of_request
        )
        return ReplicaView(
            "here",
            waiting_tokens=max(0, waiting - len(self._batch.running)),
            running=len(self._batch.running),
            max_running=config.max_running,
            prompt_tok_s=max(measured),
            block_size=config.block_size,
            blocks=self._batch.pool.block_of.keys(),
        )

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

    @property
    def tail_s(self) -> float:
        return self.learnt_tail_s * self.trust

    def _reserve(self, sequence: Sequence, incoming: Incoming, step: int, now_s: float) -> bool:
        """The sequence has its turn and fits: a slot and blocks, into which the KV arrives. False: this engine's
        prefix cache has all of it by now, so that nothing need arrive."""
        size = self._batch.config.block_size
        assert incoming.begun is not None
        cached, _ = self._batch.kv.blocks_wanted(sequence)
        needed = -(-incoming.tokens // size)
        if len(cached) >= needed:
            self._release(incoming)
            del self.incoming[incoming.number]
            sequence.request.story.add(now_s, "prefill_here", why="its KV is in the prefix cache meanwhile")
            return False
        evicted = self._batch.pool.evicted
        kept = 0 if evicted is None else len(evicted)
        held = self._batch.kv.allocate(sequence)  # of these blocks in the prefix cache
        if evicted is not None:
            del evicted[kept:]  # another engine may write at once: there is no step to save them in
        # Nothing is left to compute until the KV is here: the runner learns of the sequence then.
        sequence.computed, sequence.state = len(sequence.tokens), State.RECEIVING
        incoming.plan = TransferPlan(
            incoming.number, incoming.peer, self.layers, size, incoming.tokens, held,
            incoming.begun.blocks[:needed], tuple(sequence.blocks[held:needed]),
        )  # fmt: skip
        incoming.heard_s = now_s
        self.fetches.append((step, incoming.plan))
        sequence.request.story.add(
            now_s, "receiving", peer=incoming.peer, blocks=incoming.plan.blocks, held=held * size
        )
        sequence.request.story.wait_for(now_s, "transfer")
        return True

    def issue_fetches(self, now_s: float) -> None:
        """Copying begins when every step that may still use the blocks' former contents has run: transfers are
        not in order with steps."""
        coming = self._batch.next_plan
        if not self.fetches:
            return
        unfinished = min(self._batch.in_flight, default=coming.index)
        if unfinished == coming.index and not (coming.copies or coming.swap_out):
            unfinished += 1
        for step, plan in self.fetches:
            incoming = self.incoming.get(plan.number)
            if step < unfinished and incoming is not None and not incoming.over:
                incoming.heard_s = now_s
                self.orders.append(plan)
        self.fetches = [one for one in self.fetches if one[0] >= unfinished]

    # -- what becomes of orders ------------------------------------------------------------------------------------
    def enter_event(self, event: ReceiverEvent, now_s: float) -> None:
        """News for a decode engine. Those of orders that are over are ignored."""
        self.heard += 1
        if isinstance(event, PeerLoad):
            self.peers[event.peer] = Peer(event, now_s)
            return
        if isinstance(event, PeerLost):
            self.peers.pop(event.peer, None)
            self.router.forget(event.peer)
            for one in [one for one in self.incoming.values() if one.peer == event.peer]:
                self.fail_order(one, event.why, now_s)
            return
        incoming = self.incoming.get(event.number)
        if incoming is None or incoming.over != isinstance(event, CopyStopped):
            return
        incoming.heard_s = now_s
        story = incoming.sequence.request.story
        if isinstance(event, OrderBegun):
            incoming.begun = event
            self._batch.queue.push(incoming.sequence)  # now it waits for room, in its old place
            story.add(now_s, "prefill_begun", peer=incoming.peer, cached=event.cached_tokens)
            story.wait_for(now_s, "behind_others")
        elif isinstance(event, OrderFailed):
            self.fail_order(incoming, event.why, now_s)
        elif isinstance(event, Landed):
            self._land(incoming, event, now_s)
        elif isinstance(event, CopyStopped):
            self._keep_complete(incoming, event.complete_blocks)
            self._batch.pool.release(incoming.blocks)
            del self.incoming[event.number]

    def _land(self, incoming: Incoming, landed: Landed, now_s: float) -> None:
        """Everything but the last token is computed: the sequence runs, and the next step draws."""
        sequence = incoming.sequence
        self.learn(landed)
        self._release(incoming)
        del self.incoming[incoming.number]
        assert incoming.plan is not None
        sequence.computed, sequence.state = incoming.tokens, State.RUNNING
        self._batch.kv.register_blocks(sequence, 0, incoming.tokens)
        self._batch.add_running(sequence)
        self._batch.next_plan.begin.append(new_slot(sequence))
        sequence.request.story.add(
            now_s, "received", blocks=incoming.plan.blocks, peer=incoming.peer, tail_ms=landed.tail_s * 1e3
        )
        held = incoming.plan.held_blocks * self._batch.config.block_size
        sequence.request.story.admit(now_s, self._batch.next_plan.index, len(sequence.tokens), held, 0)

    def learn(self, landed: Landed) -> None:
        self.landed += 1
        self.trust = 1.0
        self.learnt_tail_s += 0.2 * (landed.tail_s - self.learnt_tail_s)
        self.copied_bytes += landed.copied_bytes
        self.copying_s += landed.copying_s

    def _release(self, incoming: Incoming) -> None:
        """Its blocks are here, or no longer wanted."""
        self.orders.append(ReleaseOrder(incoming.number, incoming.peer))
        del self.of_request[incoming.sequence.request.id]

    def _give_up(self, incoming: Incoming) -> int:
        """Release an order before all has arrived. Blocks stay its own until nothing writes into them any more;
        returns the slot that the sequence had, or -1."""
        sequence = incoming.sequence
        self._release(incoming)
        if incoming.plan is None:
            del self.incoming[incoming.number]
        else:
            incoming.over, incoming.blocks = True, sequence.blocks
            sequence.blocks, sequence.capacity, sequence.computed = [], 0, 0
        slot, sequence.slot = sequence.slot, -1
        return slot

    def _keep_complete(self, incoming: Incoming, blocks: int) -> None:
        """Full blocks that arrived before the transfer ended are as good as any in the prefix cache."""
        full = min(blocks, incoming.tokens // self._batch.config.block_size)
        hashes = incoming.sequence.extend_hashes(full, self._batch.config.block_size)
        self._batch.pool.register_many(incoming.blocks[:full], hashes)

    def fail_order(self, incoming: Incoming, why: str, now_s: float) -> None:
        """An order has failed: its prompt is computed where that is predicted to be cheapest now."""
        if incoming.over:
            return
        sequence = incoming.sequence
        self.failed += 1
        request = sequence.request
        was_seated, was_queued = sequence.state == State.RECEIVING, incoming.begun is not None
        slot = self._give_up(incoming)
        if was_seated:
            self._batch.kv.free_slots.append(slot)
            self._batch.kv.free_slots += request.reserved_slots
            request.reserved_slots = []
            self._batch.queue.park(sequence)
        elif was_queued:
            self._batch.queue.set_aside(sequence)
        request.story.add(now_s, "prefill_failed", peer=incoming.peer, why=why)
        if not self.order_prefill(sequence, now_s, incoming.failed_at | {incoming.peer}):
            self._batch.queue.push(sequence)
            request.story.wait_for(now_s, "behind_others")
