"""Handover: what KV transfers change in the scheduler, on both sides, as an extension of it. What is decided is
told in the stories of the requests.

A decode engine's request is parked while another engine computes its prompt, waits in the queue for a slot and
blocks once that has begun, and holds them while the KV arrives (`State.RECEIVING`). A prefill engine keeps an
order's blocks until the receiver releases them. Blocks that a transfer may still write to are never given to
anybody else, whatever has become of the request.
"""

from cumulo.engine.decide.adapters import AdapterSlots
from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight
from cumulo.engine.decide.core.kv_manager import new_slot
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.plan import Send, StepPlan, StepResult
from cumulo.engine.decide.routing import Ask, ReplicaView
from cumulo.engine.decide.transfer.orders import (
    ComputeOrder,
    CopyMoved,
    CopyStopped,
    FetchOrder,
    Landed,
    OrderBegun,
    OrderComputed,
    OrderFailed,
    PeerLoad,
    PeerLost,
    ReceiverEvent,
    TransferPlan,
)
from cumulo.engine.decide.transfer.under_way import (
    MOST_ORDERS,
    Incoming,
    Outgoing,
    Peer,
    Transfers,
    choose_prefill,
    why_whole,
)


class Handover(Extension):
    def __init__(self, batch: RequestBatch, adapters: AdapterSlots) -> None:
        self._batch, self._adapters = batch, adapters
        self.transfers = Transfers()

    def receive(self, layers: int, stall_s: float) -> None:
        """This is a decode engine: prompts are computed elsewhere where that is sooner."""
        self.transfers.receives, self.transfers.layers, self.transfers.stall_s = True, layers, stall_s
        self._batch.kv.written_by_others = True

    # -- the points of a step -----------------------------------------------------------------------------
    def hold_back(self, sequence: Sequence, now_s: float) -> bool:
        return self.transfers.receives and self.order_prefill(sequence, now_s)

    def begin_step(self, plan: StepPlan, now_s: float) -> None:
        """Transfers that stand still, and engines that do, are not waited for."""
        transfers, stall_s = self.transfers, self.transfers.stall_s
        if not transfers.receives:
            return
        for name in [name for name, peer in transfers.peers.items() if peer.heard_s < now_s - stall_s]:
            self.enter_event(PeerLost(name, f"it said nothing for {stall_s:g} s"), now_s)
        for one in list(transfers.incoming.values()):
            if one.plan is not None and not one.over and one.heard_s < now_s - stall_s:
                self.fail_order(one, f"nothing arrived for {stall_s:g} s", now_s)

    def take_admission(self, sequence: Sequence, plan: StepPlan, now_s: float) -> bool:
        incoming = self.transfers.of_request.get(sequence.request.id)
        return incoming is not None and self.reserve(sequence, incoming, plan.index, now_s)

    def admitted(self, sequence: Sequence, cached: int, plan: StepPlan, now_s: float) -> int:
        if sequence.request.prefill_only:
            # What this very step fetches from host memory cannot be read yet: the step's end tells of it.
            self.offer(sequence, cached)
        return 0

    def end_step(self, plan: StepPlan, flight: Flight, now_s: float) -> None:
        if self.transfers.outgoing:
            for row in range(flight.decoding, len(flight.rows)):
                sequence = flight.rows[row]
                if sequence.request.prefill_only:
                    plan.sends.append(Send(row, sequence.request.id, sequence.computed))
        if not flight.rows:
            self.issue_fetches(now_s)

    def after_result(self, plan: StepPlan, flight: Flight, result: StepResult, now_s: float) -> None:
        for send in plan.sends:
            ordered = flight.rows[send.row]
            if ordered.state == State.RUNNING and send.tokens == len(ordered.tokens):
                self._batch.finish(ordered, "stop", now_s)
        self.issue_fetches(now_s)

    def step_failed(self, plan: StepPlan, now_s: float) -> None:
        self.issue_fetches(now_s)

    def sequence_ended(self, sequence: Sequence, now_s: float) -> None:
        incoming = self.transfers.of_request.get(sequence.request.id)
        if incoming is not None:
            self.transfers.give_up(incoming)
        if sequence.request.prefill_only:
            self.transfers.answer(sequence, now_s)

    def problems(self, owned: list[list[int]]) -> list[str]:
        owned += [one.blocks for one in self.transfers.incoming.values()]
        owned += [one.blocks for one in self.transfers.outgoing.values()]
        return []

    # -- a decode engine orders ------------------------------------------------------------------------------------
    def order_prefill(
        self, sequence: Sequence, now_s: float, failed_at: frozenset[str] = frozenset()
    ) -> bool:
        """Decide where a waiting sequence's tokens are computed; True: elsewhere, and it is ordered."""
        transfers, request = self.transfers, sequence.request
        tokens = len(sequence.tokens) - 1
        obstacle = why_whole(request.params, len(sequence.tokens))
        if obstacle is None and len(request.sequences) > 1:
            obstacle = "several samples of it are continued, and each would need its own KV"
        if obstacle is None and len(failed_at) >= MOST_ORDERS:
            obstacle = f"{len(failed_at)} prefill engines have failed it"
        if obstacle is not None:
            request.story.add(now_s, "prefill_here", why=obstacle)
            return False
        hashes = sequence.extend_hashes(
            tokens // self._batch.config.block_size, self._batch.config.block_size
        )
        ask = Ask(tokens, hashes)
        here = self._view()
        peers = transfers.views(failed_at, self._batch.config.block_size, here.prompt_tok_s)
        choice = choose_prefill(ask, here, peers, transfers.tail_s, transfers.router)
        if choice.peer is None:
            transfers.trust *= 0.9
            request.story.add(now_s, "prefill_here", why=choice.why)
            return False
        number = next(transfers.numbers)
        incoming = Incoming(number, sequence, choice.peer, tokens, now_s, now_s, failed_at)
        transfers.incoming[number] = transfers.of_request[request.id] = incoming
        adapter = "" if request.adapter < 0 else self._adapters.in_slot(request.adapter).fingerprint
        transfers.orders.append(
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
        measured = [peer.load.prompt_tok_s for peer in self.transfers.peers.values()]
        if costs.knows_prompts or not any(measured):
            measured.append(1.0 / costs.prompt_s_per_token)
        waiting = sum(
            one.to_compute
            for request in self._batch.requests.values()
            for one in request.sequences
            if one.state != State.FINISHED and request.id not in self.transfers.of_request
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

    def reserve(self, sequence: Sequence, incoming: Incoming, step: int, now_s: float) -> bool:
        """The sequence has its turn and fits: a slot and blocks, into which the KV arrives. False: this engine's
        prefix cache has all of it by now, so that nothing need arrive."""
        transfers, size = self.transfers, self._batch.config.block_size
        assert incoming.begun is not None
        cached, _ = self._batch.kv.blocks_wanted(sequence)
        needed = -(-incoming.tokens // size)
        if len(cached) >= needed:
            transfers.release(incoming)
            del transfers.incoming[incoming.number]
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
            incoming.number, incoming.peer, transfers.layers, size, incoming.tokens, held,
            incoming.begun.blocks[:needed], tuple(sequence.blocks[held:needed]),
        )  # fmt: skip
        incoming.heard_s = now_s
        transfers.fetches.append((step, FetchOrder(incoming.plan)))
        sequence.request.story.add(
            now_s, "receiving", peer=incoming.peer, blocks=incoming.plan.blocks, held=held * size
        )
        sequence.request.story.wait_for(now_s, "transfer")
        return True

    def issue_fetches(self, now_s: float) -> None:
        """Copying begins when every step that may still use the blocks' former contents has run: transfers are
        not in order with steps."""
        transfers, coming = self.transfers, self._batch.next_plan
        if not transfers.fetches:
            return
        unfinished = min(self._batch.in_flight, default=coming.index)
        if unfinished == coming.index and not (coming.copies or coming.swap_out):
            unfinished += 1
        for step, order in transfers.fetches:
            incoming = transfers.incoming.get(order.plan.number)
            if step < unfinished and incoming is not None and not incoming.over:
                incoming.heard_s = now_s
                transfers.orders.append(order)
        transfers.fetches = [one for one in transfers.fetches if one[0] >= unfinished]

    # -- what becomes of orders ------------------------------------------------------------------------------------
    def enter_event(self, event: ReceiverEvent, now_s: float) -> None:
        """News for a decode engine. Those of orders that are over are ignored."""
        transfers = self.transfers
        transfers.heard += 1
        if isinstance(event, PeerLoad):
            transfers.peers[event.peer] = Peer(event, now_s)
            return
        if isinstance(event, PeerLost):
            transfers.peers.pop(event.peer, None)
            transfers.router.forget(event.peer)
            transfers.landed_first.clear()
            for one in [one for one in transfers.incoming.values() if one.peer == event.peer]:
                self.fail_order(one, event.why, now_s)
            return
        if isinstance(event, OrderComputed):
            self._tell_computed(event, now_s)
            return
        incoming = transfers.incoming.get(event.number)
        if incoming is None:
            return
        if isinstance(event, CopyStopped):
            if incoming.over:
                self._keep_complete(incoming, event.complete_blocks)
                self._batch.pool.release(incoming.blocks)
                del transfers.incoming[event.number]
            return
        if incoming.over:
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
        else:
            assert isinstance(event, CopyMoved)

    def _land(self, incoming: Incoming, landed: Landed, now_s: float) -> None:
        """Everything but the last token is computed: the sequence runs, and the next step draws."""
        transfers, sequence = self.transfers, incoming.sequence
        transfers.learn(landed)
        transfers.release(incoming)
        del transfers.incoming[incoming.number]
        if not incoming.told:
            transfers.landed_first[incoming.number] = sequence
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

    def _tell_computed(self, event: OrderComputed, now_s: float) -> None:
        """How long the prefill engine took. Blocks may have arrived before it said so."""
        incoming = self.transfers.incoming.get(event.number)
        sequence = incoming.sequence if incoming else self.transfers.landed_first.pop(event.number, None)
        if sequence is None or (incoming is not None and incoming.over):
            return
        sequence.request.story.add(
            now_s, "prefill_done", peer=event.peer, queued_ms=event.queued_s * 1e3,
            computed_ms=event.computed_s * 1e3,
        )  # fmt: skip
        if incoming is not None:
            incoming.told, incoming.heard_s = True, now_s

    def _keep_complete(self, incoming: Incoming, blocks: int) -> None:
        """Full blocks that arrived before the transfer ended are as good as any in the prefix cache."""
        full = min(blocks, incoming.tokens // self._batch.config.block_size)
        hashes = incoming.sequence.extend_hashes(full, self._batch.config.block_size)
        self._batch.pool.register_many(incoming.blocks[:full], hashes)

    def fail_order(self, incoming: Incoming, why: str, now_s: float) -> None:
        """An order has failed: its prompt is computed where that is predicted to be cheapest now."""
        if incoming.over:
            return
        transfers, sequence = self.transfers, incoming.sequence
        transfers.failed += 1
        request = sequence.request
        was_seated, was_queued = sequence.state == State.RECEIVING, incoming.begun is not None
        slot = transfers.give_up(incoming)
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

    # -- a prefill engine ------------------------------------------------------------------------------------------
    def offer(self, sequence: Sequence, cached_tokens: int) -> None:
        """An order was admitted: its blocks are known, and held for the receiver."""
        key = sequence.request.id
        outgoing = self.transfers.outgoing[key]
        outgoing.blocks = sequence.blocks[:]
        self._batch.pool.share(outgoing.blocks)
        self.transfers.answers.append(
            (key, OrderBegun(outgoing.number, tuple(outgoing.blocks), cached_tokens))
        )

    def accept(self, sequence: Sequence, number: int) -> None:
        self.transfers.outgoing[sequence.request.id] = Outgoing(sequence, number)

    def release(self, key: str, now_s: float) -> None:
        """The receiver has the blocks, or wants them no more."""
        outgoing = self.transfers.outgoing.get(key)
        if outgoing is None:
            return
        self._batch.pool.release(outgoing.blocks)
        outgoing.blocks = []
        if outgoing.sequence.to_compute or outgoing.sequence.state == State.FINISHED:
            del self.transfers.outgoing[key]
            self._batch.finish_all(outgoing.sequence.request, "abort", now_s)
        else:  # its last layer arrived before this engine's own result: it still says how long it took
            outgoing.released = True

    def load(self) -> PeerLoad:
        """A prefill engine's word about itself."""
        costs = self._batch.kv.costs
        waiting = sum(
            one.to_compute for request in self._batch.requests.values() for one in request.sequences
        )
        speed = 1.0 / costs.prompt_s_per_token if costs.knows_prompts else 0.0
        return PeerLoad(waiting, len(self._batch.running), speed, self._batch.config.max_running)
