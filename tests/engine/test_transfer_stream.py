"""KV over TCP, staged through pages of host memory: every block arrives where it should, however pages cut it, and
engines draw the tokens of one."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.transfer.orders import LayerPiece
from cumulo.engine.play import transfer_stream
from cumulo.engine.play.transfer_stream import StreamExport, StreamSource
from cumulo.engine.play.transfer_wire import RankCaches
from cumulo.models.batch import KVCache
from tests.engine.split_engines import PrefillThread, close, decode_engine, run_split, wait_for_peers
from tests.engine.tiny_engine import SPECS, VOCAB, make_decoder, make_engine
from tests.engine.tiny_engine import run as run_engine

GREETING = b"greeting"


def caches(count: int, blocks: int, seed: int) -> RankCaches:
    generator = torch.Generator().manual_seed(seed)
    made = [KVCache(SPECS["dense"], blocks, 8) for _ in range(count)]
    for cache in made:
        for storage in (cache.key_storage, cache.value_storage):
            storage.copy_(torch.randn(storage.shape, generator=generator))
    return RankCaches(made)


@contextmanager
def served(export: Any) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            assert connection.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
            export.serve(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("page", [1000, 1 << 20])  # smaller than a block, and larger than everything
def test_blocks_arrive_through_pages_of_any_size(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_stream, "PAGE_BYTES", page)
    theirs, ours = caches(2, 9, 1), caches(2, 7, 2)
    expected = [(one.key_storage.clone(), one.value_storage.clone()) for one in ours.ranks]
    layers, pairs = theirs.spec.layers, [(8, 0), (2, 3), (3, 4), (0, 6)]
    with served(StreamExport(theirs)) as address:
        reads = StreamSource(ours, address, GREETING)
        copied = reads.read(LayerPiece(0, layers, *zip(*pairs, strict=True)))
        copied += reads.read(LayerPiece(1, 1, *zip(*[(5, 5)], strict=True)))
        reads.settle()
        reads.close()
    for rank, (keys, values) in enumerate(expected):
        for mine, sent in (
            (keys, theirs.ranks[rank].key_storage),
            (values, theirs.ranks[rank].value_storage),
        ):
            for first, to in pairs:
                mine[:, to] = sent[:, first]
            mine[1, 5] = sent[1, 5]
        assert torch.equal(ours.ranks[rank].key_storage, keys)
        assert torch.equal(ours.ranks[rank].value_storage, values)
    block = ours.ranks[0].key_storage[0, 0].nbytes + ours.ranks[0].value_storage[0, 0].nbytes
    assert copied == 2 * block * (len(pairs) * layers + 1)


@pytest.mark.parametrize("wrong", [(9, 0), (0, 7)])  # there and here
def test_blocks_that_do_not_exist_end_the_transfer_and_write_nothing(wrong: tuple[int, int]) -> None:
    theirs, ours = caches(1, 9, 1), caches(1, 7, 2)
    before = ours.key_storage.clone()
    with served(StreamExport(theirs)) as address:
        reads = StreamSource(ours, address, GREETING)
        with pytest.raises(OSError, match=r"do not exist|closed the connection|reset"):
            reads.read(LayerPiece(0, 1, *zip(*[wrong], strict=True)))
        reads.close()
    assert torch.equal(ours.key_storage, before)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_engines_that_stage_kv_draw_the_tokens_of_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_stream, "PAGE_BYTES", 700)
    options: dict[str, Any] = dict(blocks=30, block_size=8, max_running=5, max_tokens_per_step=16)
    decoder = make_decoder(name)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    prompts = [[(seed * 11 + j * 7) % VOCAB for j in range(30 + 9 * seed)] for seed in range(3)]
    one = make_engine(decoder, **options)
    ids = [one.add(prompt, params).id for prompt in prompts]
    alone = {name: output.samples[0] for name, output in run_engine(one).items()}
    prefill = PrefillThread(decoder, "tcp:127.0.0.1:0", **options)
    split = decode_engine(decoder, [("p", prefill.sender.address)], **options)
    wait_for_peers(split)
    asked = [split.add(prompt, params).id for prompt in prompts]
    said = run_split(split)
    for mine, theirs in zip(asked, ids, strict=True):
        found, expected = said[mine].samples[0], alone[theirs]
        assert found.token_ids == expected.token_ids
        ours, other = ([entry.logprob for entry in one.logprobs or ()] for one in (found, expected))
        assert ours == pytest.approx(other, abs=1e-9)
    assert split.scheduler.transfers.landed > 0 and split.scheduler.transfers.failed == 0
    close(split)
    prefill.finish()
