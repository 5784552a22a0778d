"""Handover: what KV transfers change in the scheduler's books, on both sides. Asked by the scheduler and admission;
what is decided is told in the stories of the requests.

A decode engine's request is parked while another engine computes its prompt, waits in the queue for a slot and
blocks once that has begun, and holds them while the KV arrives (`State.RECEIVING`). A prefill engine keeps an
order's blocks until the receiver releases them. Blocks that a transfer may still write to are never given to
anybody else, whatever has become of the request.
"""

from cumulo.engine.decide.books import Books
from cumulo.engine.decide.request import Sequence, State
from cumulo.engine.decide.residency import new_slot
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
)
from cumulo.engine.decide.transfer.place import MOST_ORDERS, choose_prefill, why_whole
from cumulo.engine.decide.transfer.travel import TransferPlan
from cumulo.engine.decide.transfer.under_way import Incoming, Outgoing, Peer, Transfers


# -- a decode engine orders ------------------------------------------------------------------------------------
def order_prefill(
    books: Books, sequence: Sequence, now_s: float, failed_at: frozenset[str] = frozenset()
) -> bool:
    """Decide where a waiting sequence's tokens are computed; True: elsewhere, and it is ordered."""
    transfers, request = books.transfers, sequence.request
    tokens = len(sequence.tokens) - 1
    obstacle = why_whole(request.params, len(sequence.tokens))
    if obstacle is None and len(request.sequences) > 1:
        obstacle = "several samples of it are continued, and each would need its own KV"
    if obstacle is None and len(failed_at) >= MOST_ORDERS:
        obstacle = f"{len(failed_at)} prefill engines have failed it"
    if obstacle is not None:
        request.story.add(now_s, "prefill_here", why=obstacle)
        return False
    hashes = sequence.extend_hashes(tokens // books.config.block_size, books.config.block_size)
    ask = Ask(tokens, hashes)
    here = _view(books)
    peers = transfers.views(failed_at, books.config.block_size, here.prompt_tok_s)
    choice = choose_prefill(ask, here, peers, transfers.tail_s, transfers.router)
    if choice.peer is None:
        transfers.trust *= 0.9
        request.story.add(now_s, "prefill_here", why=choice.why)
        return False
    number = transfers.next_number()
    incoming = Incoming(number, sequence, choice.peer, tokens, now_s, now_s, failed_at)
    transfers.incoming[number] = transfers.of_request[request.id] = incoming
    transfers.orders.append(
        ComputeOrder(
            number, choice.peer, sequence.tokens[:tokens], request.id, request.cache_salt, request.share.name,
            request.priority, "" if request.adapter is None else request.adapter.fingerprint,
        )
    )  # fmt: skip
    request.story.add(now_s, "prefill_there", peer=choice.peer, tokens=tokens, why=choice.why)
    request.story.wait_for(now_s, "prefill")
    return True


def _view(books: Books) -> ReplicaView:
    """This engine as a router sees it. Prompts computed elsewhere are no work here. Engines of a fleet are alike:
    one that has computed no prompt yet is as fast as the others."""
    config, costs = books.config, books.residency.costs
    measured = [peer.load.prompt_tok_s for peer in books.transfers.peers.values()]
    if costs.knows_prompts or not any(measured):
        measured.append(1.0 / costs.prompt_s_per_token)
    waiting = sum(
        one.to_compute
        for request in books.requests.values()
        for one in request.sequences
        if one.state != State.FINISHED and request.id not in books.transfers.of_request
    )
    return ReplicaView(
        "here",
        waiting_tokens=max(0, waiting - len(books.running)),
        running=len(books.running),
        max_running=config.max_running,
        prompt_tok_s=max(measured),
        block_size=config.block_size,
        blocks=books.pool.block_of.keys(),
    )


def reserve(books: Books, sequence: Sequence, incoming: Incoming, step: int, now_s: float) -> bool:
    """The sequence has its turn and fits: a slot and blocks, into which the KV arrives. False: this engine's
    prefix cache has all of it by now, so that nothing need arrive."""
    transfers, size = books.transfers, books.config.block_size
    assert incoming.begun is not None
    cached, _ = books.residency.blocks_wanted(sequence)
    needed = -(-incoming.tokens // size)
    if len(cached) >= needed:
        transfers.release(incoming)
        del transfers.incoming[incoming.number]
        sequence.request.story.add(now_s, "prefill_here", why="its KV is in the prefix cache meanwhile")
        return False
    held = books.residency.seat_receiving(sequence)
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


def issue_fetches(books: Books, now_s: float) -> None:
    """Copying begins when every step that may still use the blocks' former contents has run: transfers are not in
    order with steps."""
    transfers, coming = books.transfers, books.next_plan
    if not transfers.fetches:
        return
    unfinished = min(books.in_flight, default=coming.index)
    if unfinished == coming.index and not (coming.copies or coming.swap_out):
        unfinished += 1
    for step, order in transfers.fetches:
        incoming = transfers.incoming.get(order.plan.number)
        if step < unfinished and incoming is not None and not incoming.over:
            incoming.heard_s = now_s
            transfers.orders.append(order)
    transfers.fetches = [one for one in transfers.fetches if one[0] >= unfinished]


# -- what becomes of orders ------------------------------------------------------------------------------------
def enter_event(books: Books, event: ReceiverEvent, now_s: float) -> None:
    """News for a decode engine. Those of orders that are over are ignored."""
    transfers = books.transfers
    transfers.heard += 1
    if isinstance(event, PeerLoad):
        transfers.peers[event.peer] = Peer(event, now_s)
        return
    if isinstance(event, PeerLost):
        transfers.peers.pop(event.peer, None)
        transfers.router.forget(event.peer)
        transfers.landed_first.clear()
        for one in [one for one in transfers.incoming.values() if one.peer == event.peer]:
            fail_order(books, one, event.why, now_s)
        return
    if isinstance(event, OrderComputed):
        _tell_computed(transfers, event, now_s)
        return
    incoming = transfers.incoming.get(event.number)
    if incoming is None:
        return
    if isinstance(event, CopyStopped):
        if incoming.over:
            _keep_complete(books, incoming, event.complete_blocks)
            books.pool.release(incoming.blocks)
            del transfers.incoming[event.number]
        return
    if incoming.over:
        return
    incoming.heard_s = now_s
    story = incoming.sequence.request.story
    if isinstance(event, OrderBegun):
        incoming.begun = event
        books.queue.push(incoming.sequence)  # now it waits for room, in its old place
        story.add(now_s, "prefill_begun", peer=incoming.peer, cached=event.cached_tokens)
        story.wait_for(now_s, "behind_others")
    elif isinstance(event, OrderFailed):
        fail_order(books, incoming, event.why, now_s)
    elif isinstance(event, Landed):
        _land(books, incoming, event, now_s)
    else:
        assert isinstance(event, CopyMoved)


def _tell_computed(transfers: Transfers, event: OrderComputed, now_s: float) -> None:
    """How long the prefill engine took. Blocks may have arrived before it said so."""
    incoming = transfers.incoming.get(event.number)
    sequence = incoming.sequence if incoming is not None else transfers.landed_first.pop(event.number, None)
    if sequence is not None and (incoming is None or not incoming.over):
        sequence.request.story.add(
            now_s, "prefill_done", peer=event.peer, queued_ms=event.queued_s * 1e3,
            computed_ms=event.computed_s * 1e3,
        )  # fmt: skip
        if incoming is not None:
            incoming.told, incoming.heard_s = True, now_s


def _land(books: Books, incoming: Incoming, landed: Landed, now_s: float) -> None:
    """Everything but the last token is computed: the sequence runs, and the next step draws."""
    transfers, sequence = books.transfers, incoming.sequence
    transfers.learn(landed)
    transfers.release(incoming)
    del transfers.incoming[incoming.number]
    if not incoming.told:
        transfers.landed_first[incoming.number] = sequence
    assert incoming.plan is not None
    sequence.computed, sequence.state = incoming.tokens, State.RUNNING
    books.residency.register_blocks(sequence, 0, incoming.tokens)
    books.add_running(sequence)
    books.next_plan.begin.append(new_slot(sequence))
    sequence.request.story.add(
        now_s, "received", blocks=incoming.plan.blocks, peer=incoming.peer, tail_ms=landed.tail_s * 1e3
    )
    held = incoming.plan.held_blocks * books.config.block_size
    sequence.request.story.admit(now_s, books.next_plan.index, len(sequence.tokens), held, 0, "transfer")


def _keep_complete(books: Books, incoming: Incoming, blocks: int) -> None:
    """Full blocks that arrived before the transfer ended are as good as any in the prefix cache."""
    full = min(blocks, incoming.tokens // books.config.block_size)
    hashes = incoming.sequence.extend_hashes(full, books.config.block_size)
    books.pool.register_many(incoming.blocks[:full], hashes)


def fail_order(books: Books, incoming: Incoming, why: str, now_s: float) -> None:
    """An order has failed: its prompt is computed where that is predicted to be cheapest now."""
    if incoming.over:
        return
    transfers, sequence = books.transfers, incoming.sequence
    transfers.failed += 1
    request = sequence.request
    was_seated, was_queued = sequence.state == State.RECEIVING, incoming.begun is not None
    slot = transfers.give_up(incoming)
    if was_seated:
        books.residency.free_slots.append(slot)
        books.residency.free_slots += request.reserved_slots
        request.reserved_slots = []
        books.queue.park(sequence)
    elif was_queued:
        books.queue.set_aside(sequence)
    request.story.add(now_s, "prefill_failed", peer=incoming.peer, why=why)
    if not order_prefill(books, sequence, now_s, incoming.failed_at | {incoming.peer}):
        books.queue.push(sequence)
        request.story.wait_for(now_s, "behind_others")


def give_up_late(books: Books, now_s: float) -> None:
    """Transfers that stand still, and engines that do, are not waited for."""
    transfers = books.transfers
    for name in transfers.silent(now_s):
        why = f"it said nothing for {transfers.stall_s:g} s"
        enter_event(books, PeerLost(name, why), now_s)
    for incoming, why in transfers.stalled(now_s):
        fail_order(books, incoming, why, now_s)


# -- a prefill engine ------------------------------------------------------------------------------------------
def offer(books: Books, sequence: Sequence, cached_tokens: int) -> None:
    """An order was admitted: its blocks are known, and held for the receiver."""
    key = sequence.request.id
    outgoing = books.transfers.outgoing[key]
    outgoing.blocks = sequence.blocks[:]
    books.pool.share(outgoing.blocks)
    books.transfers.answers.append((key, OrderBegun(outgoing.number, tuple(outgoing.blocks), cached_tokens)))


def accept(books: Books, sequence: Sequence, number: int) -> None:
    books.transfers.outgoing[sequence.request.id] = Outgoing(sequence, number)


def release(books: Books, key: str, now_s: float) -> None:
    """The receiver has the blocks, or wants them no more."""
    outgoing = books.transfers.outgoing.get(key)
    if outgoing is None:
        return
    books.pool.release(outgoing.blocks)
    outgoing.blocks = []
    if outgoing.sequence.to_compute or outgoing.sequence.state == State.FINISHED:
        del books.transfers.outgoing[key]
        books.finish_all(outgoing.sequence.request, "abort", now_s)
    else:  # its last layer arrived before this engine's own result: it still says how long it took
        outgoing.released = True


def load(books: Books) -> PeerLoad:
    """A prefill engine's word about itself."""
    costs = books.residency.costs
    waiting = sum(one.to_compute for request in books.requests.values() for one in request.sequences)
    speed = 1.0 / costs.prompt_s_per_token if costs.knows_prompts else 0.0
    return PeerLoad(waiting, len(books.running), speed, books.config.max_running)
