"""Prefill and decode on two engines: the decisions behind it."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Request, State
from cumulo.engine.decide.core.step_cost import StepMix
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.routing import Ask, PrefixAware, ReplicaView
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.transfer.orders import (
    ComputeOrder,
    CopyStopped,
    Landed,
    LayerPiece,
    OrderBegun,
    OrderFailed,
    PeerLoad,
    PeerLost,
    ReleaseOrder,
    TransferPlan,
    TransferProgress,
    named_addresses,
    parse_address,
)
from cumulo.engine.decide.transfer.prefilling import Outgoing
from cumulo.engine.decide.transfer.transfers import Peer, choose_prefill
from cumulo.errors import CumuloError
from tests.engine.invariants import problems
from tests.engine.tiny_engine import VOCAB, make_decoder, make_engine
from tests.engine.tiny_engine import run as run_engine


# -- where from ---------------------------------------------------------------------------------------------
def test_prefill_engines_have_names_and_addresses_of_their_own() -> None:
    assert named_addresses(("a=unix:/x", "tcp:b:9")) == [("a", "unix:/x"), ("prefill-1", "tcp:b:9")]
    with pytest.raises(CumuloError, match="two prefill engines have the name 'a'"):
        named_addresses(("a=unix:/x", "a=unix:/y"))
    with pytest.raises(CumuloError, match="two prefill engines have the address 'unix:/x'"):
        named_addresses(("a=unix:/x", "b=unix:/x"))


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    assert parse_address("unix:/" + 106 * "x") == "/" + 106 * "x"
    with pytest.raises(CumuloError, match=r"up to 107 bytes, .* has 108: choose a shorter one"):
        parse_address("unix:/" + 107 * "x")


# -- what travels ---------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 4), size=st.sampled_from([1, 4, 16]), tokens=st.integers(1, 60), held=st.integers(0, 5),
    chunk=st.integers(1, 40), most=st.integers(1, 9), together=st.integers(1, 4),
    shuffle=st.randoms(use_true_random=False),
)  # fmt: skip
def test_every_block_of_every_layer_is_copied_once_and_never_before_it_is_computed(
    layers: int,
    size: int,
    tokens: int,
    held: int,
    chunk: int,
    most: int,
    together: int,
    shuffle: random.Random,
) -> None:
    blocks = -(-tokens // size)
    held = min(held, blocks - 1)
    sources = list(range(100, 100 + blocks))
    if shuffle.random() < 0.5:
        shuffle.shuffle(sources)
    targets = tuple(range(200, 200 + blocks - held))
    progress = TransferProgress(TransferPlan(1, "p", layers, size, tokens, held, tuple(sources), targets))
    computed, copied = [0] * layers, list[tuple[int, int, int]]()
    for end in [*range(chunk, tokens, chunk), tokens]:
        for layer in range(layers):
            computed[layer] = end
            progress.computed(layer + 1, end)
            while shuffle.random() < 0.7 and (piece := progress.next_piece(most, together)) is not None:
                copied += _blocks_of(piece, sources, computed, size, tokens)
    while (piece := progress.next_piece(most, together)) is not None:
        copied += _blocks_of(piece, sources, computed, size, tokens)
    assert progress.done
    assert sorted(copied) == [
        (layer, index, targets[index - held]) for layer in range(layers) for index in range(held, blocks)
    ]


def _blocks_of(
    piece: LayerPiece, sources: list[int], computed: list[int], size: int, tokens: int
) -> list[tuple[int, int, int]]:
    found = []
    for layer in range(piece.layer, piece.layer + piece.layers):
        for source, target in zip(piece.sources, piece.targets, strict=True):
            index = sources.index(source)
            assert min(tokens, (index + 1) * size) <= computed[layer]
            found.append((layer, index, target))
    return found


# -- where a prompt is computed -------------------------------------------------------------------------------
def _choice(tokens: int, *, running: int = 0, waiting_there: int = 0, tail_s: float = 2e-3):
    here = ReplicaView("here", running=running, prompt_tok_s=1000)
    there = ReplicaView("there", waiting_tokens=waiting_there, prompt_tok_s=1000, step_s=0)
    return choose_prefill(Ask(tokens), here, [there], tail_s, PrefixAware())


def test_a_long_prompt_goes_to_the_prefill_engine_and_a_short_one_stays() -> None:
    assert _choice(1000).peer == "there"
    assert _choice(1, tail_s=0.01).peer is None


def test_a_long_queue_there_keeps_a_prompt_here_unless_many_would_wait_for_it_here() -> None:
    assert _choice(1000, waiting_there=2000).peer is None
    assert _choice(1000, waiting_there=2000, running=8).peer == "there"


def test_a_prefill_engine_that_has_computed_nothing_yet_is_asked() -> None:
    scheduler = Scheduler(SchedulerConfig(blocks=8, max_context=64))
    unknown = scheduler.prefilling.load()
    transfers = scheduler.transfers
    transfers.peers["there"] = Peer(unknown, 0.0)
    here = ReplicaView("here", prompt_tok_s=8000)
    peers = transfers.views(frozenset(), 16, here.prompt_tok_s)
    assert choose_prefill(Ask(1000), here, peers, 2e-3, PrefixAware()).peer == "there"


def test_without_a_prefill_engine_prompts_are_computed_here() -> None:
    here = ReplicaView("here")
    choice = choose_prefill(Ask(1000), here, [], 0.0, PrefixAware())
    assert choice.peer is None and "no prefill engine" in choice.why


# -- the scheduler of a decode engine -------------------------------------------------------------------------
def _decoding(blocks: int = 12, **options) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(blocks=blocks, block_size=4, max_context=200, **options))
    scheduler.transfers.receive(layers=2, stall_s=10.0)
    for name in ("p0", "p1"):
        scheduler.transfers.enter_event(PeerLoad(0, 0, 1000.0, 8, name), 0.0)
    return scheduler


def _request(name: str, tokens: int = 17, **params) -> Request:
    chosen = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, **params)
    return Request(name, list(range(tokens)), chosen, seed=0, arrived_s=0.0)


def _begin(scheduler: Scheduler, order: ComputeOrder, now_s: float = 0.1) -> TransferPlan:
    """The prefill engine begins, the scheduler finds room, and says what to copy."""
    blocks = tuple(range(-(-len(order.tokens) // 4)))
    scheduler.transfers.enter_event(OrderBegun(order.number, blocks, 0, order.peer), now_s)
    assert scheduler.plan(now_s) is None
    (fetch,) = scheduler.transfers.orders
    assert isinstance(fetch, TransferPlan)
    scheduler.transfers.orders.clear()
    return fetch


def _ordered(scheduler: Scheduler, name: str = "one") -> ComputeOrder:
    scheduler.add(_request(name))
    order = scheduler.transfers.orders.pop()
    assert isinstance(order, ComputeOrder)
    return order


def _slow_prefill() -> Scheduler:
    scheduler = _decoding()
    del scheduler.transfers.peers["p1"]
    scheduler.transfers.enter_event(PeerLoad(0, 0, 50.0, 8, "p0"), 0.0)
    return scheduler


def test_an_engine_that_has_computed_no_prompt_thinks_itself_as_fast_as_a_slow_prefill_engine() -> None:
    assert _ordered(_slow_prefill()).peer == "p0"


def test_one_slow_moment_of_a_prefill_engine_and_of_its_link_is_not_believed_for_ever() -> None:
    scheduler = _slow_prefill()
    scheduler.costs.observe(StepMix(0, 0, 100), 0.01)
    scheduler.transfers.learn(Landed(0, 5.0, 0, 0.0))
    tries = 0
    while not scheduler.transfers.orders:
        tries += 1
        scheduler.add(_request(f"{tries}"))
        scheduler.abort(f"{tries}", 0.0)
        assert tries < 100
    assert tries > 2  # a while it is believed


def test_a_request_holds_no_block_until_its_prefill_begins_and_draws_when_its_blocks_are_here() -> None:
    scheduler = _decoding()
    order = _ordered(scheduler)
    assert order.tokens == array("i", range(16))  # all but the last: that is computed where it is drawn
    assert scheduler.plan(0.0) is None and scheduler.pool.used_count == 0
    plan = _begin(scheduler, order)
    assert plan.sources == (0, 1, 2, 3) and plan.blocks == 4 and problems(scheduler) == []
    scheduler.transfers.enter_event(Landed(order.number, 1e-3, 100, 1e-3), 0.2)
    step = scheduler.plan(0.2)
    assert step is not None and (step.starts, step.counts, len(step.draw_rows)) == ([16], [1], 1)
    assert scheduler.transfers.orders == [ReleaseOrder(order.number, order.peer)]
    assert problems(scheduler) == []


def test_blocks_that_a_transfer_may_still_write_to_are_nobodys_until_it_has_stopped() -> None:
    scheduler = _decoding()
    order = _ordered(scheduler)
    _begin(scheduler, order)
    used = scheduler.pool.used_count
    scheduler.abort("one", 0.2)
    assert not scheduler.requests and scheduler.pool.used_count == used and problems(scheduler) == []
    scheduler.transfers.enter_event(CopyStopped(order.number, 0), 0.3)
    assert scheduler.pool.used_count == 0 and problems(scheduler) == []


def test_copying_waits_for_steps_that_may_still_use_the_blocks() -> None:
    scheduler = _decoding()
    scheduler.add(_request("local", 1))  # short: computed here
    running = scheduler.plan(0.0)
    assert running is not None
    order = _ordered(scheduler)
    scheduler.transfers.enter_event(OrderBegun(order.number, (0, 1, 2, 3), 0, order.peer), 0.1)
    second = scheduler.plan(0.1)
    assert second is not None and scheduler.transfers.orders == []
    assert scheduler.transfers.of_request["one"].sequence.state == State.RECEIVING
    scheduler.fail_step(running, "it was only needed in flight", 0.2)
    assert scheduler.transfers.orders == []
    scheduler.fail_step(second, "likewise", 0.2)
    assert [type(one) for one in scheduler.transfers.orders] == [TransferPlan]


def test_when_a_prefill_engine_dies_the_other_one_is_asked_and_then_nobody() -> None:
    scheduler = _decoding()
    order = _ordered(scheduler)
    _begin(scheduler, order)
    scheduler.transfers.enter_event(PeerLost(order.peer, "its process ended"), 0.2)
    release, again = scheduler.transfers.orders
    assert isinstance(release, ReleaseOrder) and isinstance(again, ComputeOrder) and again.peer != order.peer
    scheduler.transfers.orders.clear()
    scheduler.transfers.enter_event(OrderFailed(again.number, "it has no room", again.peer), 0.3)
    scheduler.transfers.enter_event(CopyStopped(order.number, 0), 0.3)
    step = scheduler.plan(0.4)
    assert step is not None and step.counts == [17]
    told = scheduler.requests["one"].story.describe()
    assert f"{order.peer} does not deliver: its process ended" in told and "it has no room" in told
    assert "computed by the engine that answers" in told
    assert problems(scheduler) == []


def test_a_transfer_that_stands_still_and_an_engine_that_says_nothing_are_given_up() -> None:
    scheduler = _decoding()
    order = _ordered(scheduler)
    _begin(scheduler, order)
    late_s = 0.1 + scheduler.transfers.stall_s + 0.1
    for name in ("p0", "p1"):
        scheduler.transfers.enter_event(PeerLoad(0, 0, 1000.0, 8, name), late_s)
    scheduler.plan(late_s)
    again = next(one for one in scheduler.transfers.orders if isinstance(one, ComputeOrder))
    assert again.peer != order.peer
    assert "nothing arrived for 10 s" in scheduler.requests["one"].story.describe()
    scheduler.plan(late_s + 20)
    assert scheduler.transfers.peers == {} and not scheduler.transfers.of_request


def test_what_arrived_of_a_failed_transfer_is_not_computed_again() -> None:
    scheduler = _decoding(blocks=20)
    order = _ordered(scheduler)
    _begin(scheduler, order)
    scheduler.transfers.peers = {}
    scheduler.transfers.enter_event(CopyStopped(order.number, 2), 0.2)  # not asked for: ignored
    scheduler.transfers.enter_event(PeerLost(order.peer, "gone"), 0.2)
    scheduler.transfers.enter_event(CopyStopped(order.number, 2), 0.2)
    step = scheduler.plan(0.3)
    assert step is not None and (step.starts, step.counts) == ([8], [9])


def test_a_prefill_engine_tells_of_blocks_from_host_memory_when_its_step_has_fetched_them() -> None:
    """A receiver that read them at once would get what is in their places before."""
    engine = make_engine(make_decoder("dense"), blocks=7, block_size=4, tier_blocks=20)
    prompts = [[(seed * 11 + j * 7) % VOCAB for j in range(20)] for seed in range(2)]
    for prompt in prompts:  # each drives the other out
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=1))
        run_engine(engine)
    scheduler = engine.scheduler
    order = Request("1.7", prompts[0], SamplingParams(temperature=0, max_tokens=1), seed=0, arrived_s=0.0)
    order.prefill_only = True
    scheduler.add(order)
    scheduler.prefilling.outgoing[order.sequences[0].request.id] = Outgoing(order.sequences[0], 7)
    step = scheduler.plan(0.0)
    assert step is not None and len(step.swap_in) == 2 and step.starts == [16]
    ((_, begun),) = scheduler.prefilling.answers
    assert isinstance(begun, OrderBegun) and begun.cached_tokens == 8
    assert [send.tokens for send in step.sends] == [20]
