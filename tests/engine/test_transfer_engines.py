"""Prefill and decode on two engines: the same tokens and log-probabilities as on one, whatever dies on the way."""

import json
import random
import socket
import struct
from array import array
from dataclasses import asdict

import pytest
import torch

from cumulo.engine.decide.transfer.orders import (
    ComputeOrder,
    CopyStopped,
    Landed,
    OrderBegun,
    PeerLoad,
    PeerLost,
    ReleaseOrder,
    SenderEvent,
    TransferPlan,
)
from cumulo.engine.play.transfer_receiver import TransferReceiver
from cumulo.engine.play.transfer_sender import TransferSender
from cumulo.engine.play.transfer_wire import RankCaches, greeting_of
from cumulo.models.batch import KVCache
from tests.engine.equivalence import Lengths, _ends, _log_probabilities, draw_requests, run_alone
from tests.engine.split_engines import (
    PrefillThread,
    address_in,
    close,
    decode_engine,
    run_split,
    wait_for_peers,
)
from tests.engine.tiny_engine import VOCAB, make_decoder, make_engine

OPTIONS = dict(blocks=30, block_size=8, max_running=5, max_tokens_per_step=16, overlap=True)


def told(mailbox, kind, before=lambda: None):
    """What comes first of this kind."""
    while True:
        before()
        mailbox.wait(0.1)
        if found := [one for one in mailbox.take_all() if isinstance(one, kind)]:
            return found[0]


def test_the_caches_of_many_ranks_are_opened_through_one_socket(tmp_path) -> None:
    spec, address = make_decoder("dense").spec, address_in(tmp_path, "unix")
    theirs, ours = ([KVCache(spec, 3, 4, torch.float64) for _ in range(8)] for _ in range(2))
    for rank, cache in enumerate(theirs):
        cache.key_storage.fill_(rank + 1.0)
    sender, load = TransferSender(RankCaches(theirs), "tiny", address), PeerLoad(0, 0, 1000.0, 8)
    receiver = TransferReceiver(RankCaches(ours), "tiny", [("p", address)])
    assert isinstance(told(receiver.news, PeerLoad | PeerLost, lambda: sender.words.put(load)), PeerLoad)
    receiver.orders.put_all([ComputeOrder(1, "p", array("i", range(4)), "r")])
    sender.words.put_all(
        [(told(sender.news, SenderEvent).key, OrderBegun(1, (2,), 4))]
    )  # it was cached there
    told(receiver.news, OrderBegun)
    receiver.orders.put_all([TransferPlan(1, "p", spec.layers, 4, 4, 0, (2,), (1,))])
    told(receiver.news, Landed)
    for rank, cache in enumerate(ours):
        assert (cache.key_storage[:, 1] == rank + 1).all() and not cache.key_storage[:, 0].any()
    receiver.close()
    sender.close()


def test_an_engine_in_the_place_of_a_lost_one_is_not_read_for_its_orders(tmp_path) -> None:
    spec, address = make_decoder("dense").spec, address_in(tmp_path, "unix")

    def cache(value: float) -> KVCache:
        made = KVCache(spec, 4, 4, torch.float64)
        made.key_storage.fill_(value)
        made.value_storage.fill_(value)
        return made

    ours, first = cache(0.0), TransferSender(cache(1.0), "tiny", address)
    receiver, load = TransferReceiver(ours, "tiny", [("p", address)]), PeerLoad(0, 0, 1000.0, 8)
    told(receiver.news, PeerLoad, lambda: first.words.put(load))
    receiver.orders.put_all([ComputeOrder(1, "p", array("i", range(8)), "r")])
    first.words.put_all(
        [(told(first.news, SenderEvent).key, OrderBegun(1, (0, 1), 8))]
    )  # all of it was cached there
    told(receiver.news, OrderBegun)
    first.close()
    told(receiver.news, PeerLost)
    second = TransferSender(cache(9.0), "tiny", address)
    told(receiver.news, PeerLoad, lambda: second.words.put(load))
    # The scheduler has not heard of the loss yet.
    receiver.orders.put_all([TransferPlan(1, "p", spec.layers, 4, 8, 0, (0, 1), (2, 3))])
    receiver.orders.put_all([ComputeOrder(2, "p", array("i", range(8)), "s")])
    told(second.news, SenderEvent)
    receiver.orders.put_all([ReleaseOrder(1, "p")])
    assert told(receiver.news, CopyStopped | Landed) == CopyStopped(1, 0)
    assert not ours.key_storage.any()
    receiver.close()
    second.close()


def test_strangers_neither_stop_a_prefill_engine_nor_fill_its_memory(tmp_path) -> None:
    """Who has not shown the fleet's key sends wrong types, deep nesting and long words, or says nothing."""

    def frame(body: bytes, length: int | None = None) -> bytes:
        return struct.pack("<IB", len(body) if length is None else length, 0) + body

    address, cache = address_in(tmp_path, "unix"), KVCache(make_decoder("dense").spec, 3, 4, torch.float64)
    sender, load = TransferSender(cache, "tiny", address, "the-key-of-this-fleet"), PeerLoad(0, 0, 1000.0, 8)
    greeting = asdict(greeting_of(cache, "tiny"))
    told_by_strangers = (
        frame(json.dumps(greeting | {"key": 5}).encode()),
        frame(json.dumps(greeting | {"key": ["x"], "layers": None}).encode()),
        frame(b'{"model":' + b"[" * 30_000),
        frame(b"{}", 32 << 20),
        *[b""] * 200,
    )
    strangers = [socket.socket(socket.AF_UNIX) for _ in told_by_strangers]
    for stranger, words in zip(strangers, told_by_strangers, strict=True):
        stranger.connect(address.removeprefix("unix:"))
        stranger.settimeout(60)
        stranger.sendall(words)
    for stranger in strangers[2:10]:
        assert stranger.recv(1) == b""  # closed: nonsense, a long word, and the oldest of too many
    receiver = TransferReceiver(cache, "tiny", [("p", address)], "the-key-of-this-fleet")
    assert isinstance(told(receiver.news, PeerLoad | PeerLost, lambda: sender.words.put(load)), PeerLoad)
    receiver.close()
    sender.close()
    for stranger in strangers:
        stranger.close()


# -- whole engines --------------------------------------------------------------------------------------------
def _compare(model: str, seed: int, outputs, requests, aborted=frozenset()) -> None:
    decoder = make_decoder(model)
    for index, (prompt, params, _, _) in enumerate(requests):
        got = outputs[f"r{index}"]
        if f"r{index}" in aborted and any(sample.finish_reason == "abort" for sample in got.samples):
            continue
        expected = run_alone(lambda **more: make_engine(decoder, blocks=30, **more), prompt, params)
        assert got.error is None and _ends(got) == _ends(expected), (model, seed, index)
        ours, theirs = _log_probabilities(got), _log_probabilities(expected)
        assert len(ours) == len(theirs)
        assert all(abs(a - b) <= 1e-9 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "transport"),
    [("dense", "unix"), ("dense", "tcp"), ("experts", "unix"), ("latent", "unix"), ("window", "tcp")],
)
def test_split_roles_say_the_same_as_one_engine(model: str, transport: str, tmp_path) -> None:
    rng = random.Random(7)
    requests = draw_requests(rng, 14, VOCAB, Lengths())
    prefill = PrefillThread(make_decoder(model), address_in(tmp_path, transport), **OPTIONS)
    engine = decode_engine(make_decoder(model), [("prefill-0", prefill.sender.address)], **OPTIONS)
    wait_for_peers(engine)
    for index, (prompt, params, priority, salt) in enumerate(requests):
        engine.add(prompt, params, request_id=f"r{index}", priority=priority, cache_salt=salt)
    outputs = run_split(engine)
    assert engine.scheduler.transfers.landed > len(requests) // 3
    prefill.finish()
    close(engine)
    _compare(model, 7, outputs, requests)


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 20))]
)
def test_nothing_is_lost_or_wrong_when_prefill_engines_die_or_stand_still_and_requests_are_aborted(
    seed: int, tmp_path
) -> None:
    rng, model = random.Random(seed), ("dense", "latent")[seed % 2]
    requests = draw_requests(rng, 16, VOCAB, Lengths())
    prefills = [
        PrefillThread(make_decoder(model), address_in(tmp_path, "unix", f"p{index}"), **OPTIONS)
        for index in range(2)
    ]
    peers = [(f"prefill-{index}", one.sender.address) for index, one in enumerate(prefills)]
    engine = decode_engine(make_decoder(model), peers, **OPTIONS)
    engine.scheduler.transfers.stall_s = 0.2
    wait_for_peers(engine, 2)
    victims = {f"r{index}" for index in range(len(requests)) if rng.random() < 0.2}
    for index, (prompt, params, priority, salt) in enumerate(requests):
        engine.add(prompt, params, request_id=f"r{index}", priority=priority, cache_salt=salt)
    abort_at, kill_at, stop_at = rng.randrange(1, 12), rng.randrange(1, 25), rng.randrange(1, 25)

    def between(turn: int) -> None:
        if turn == abort_at:
            for victim in victims:
                engine.abort(victim)
        if turn == kill_at:
            prefills[0].kill()
        if turn == stop_at:
            prefills[1].awake.clear()

    outputs = run_split(engine, between)
    assert len(outputs) == len(requests), "a request was lost"
    prefills[1].awake.set()
    prefills[1].finish()
    close(engine)
    _compare(model, seed, outputs, requests, victims)


def test_engines_that_differ_are_refused_with_the_reason(tmp_path) -> None:
    prefill = PrefillThread(make_decoder("dense"), address_in(tmp_path, "unix"), **OPTIONS)
    peers = [("prefill-0", prefill.sender.address)]
    engine = decode_engine(make_decoder("dense"), peers, **{**OPTIONS, "block_size": 4, "blocks": 60})
    lost = []
    while not lost:
        engine.link.news.wait(1.0)
        lost = [one for one in engine.link.news.take_all() if isinstance(one, PeerLost)]
    assert "block size" in lost[0].why and "start both engines with the same block size" in lost[0].why
    prefill.finish()
    close(engine)
