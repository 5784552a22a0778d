"""A prefill and a decode engine on tiny models, connected as two processes would be, for tests of KV transfer.

The prefill engine turns in a thread of its own, so that blocks really arrive while both compute.
"""

import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cumulo.engine.engine import Engine
from cumulo.engine.outputs import RequestOutput
from cumulo.engine.play.transfer_receiver import TransferReceiver
from cumulo.engine.play.transfer_sender import TransferSender
from cumulo.models.batch import KVCache
from cumulo.models.decoder import Decoder
from tests.engine.invariants import problems
from tests.engine.tiny_engine import make_engine

PATIENCE_S = 600.0  # with a prefill engine that says nothing: on a busy machine it may just not be its turn


class TurningEngine:
    """A prefill engine that takes its steps in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.problems: list[str] = []
        self.awake = threading.Event()  # cleared: it stands still
        self.awake.set()
        self._ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        engine = self.engine
        while not self._ended:
            self.awake.wait()
            if not engine.has_work or engine.idle:
                select.select([engine.link.news], [], [], 0.01)
            engine.exchange()
            if engine.has_work:
                engine.step()
            self.problems += problems(engine.scheduler)

    def stop(self) -> None:
        self._ended = True
        self.awake.set()
        self._thread.join()

    def finish(self) -> None:
        """Until every block has been released."""
        while self._thread.is_alive() and (self.engine.scheduler.transferring or self.engine.has_work):
            self._thread.join(0.005)
        self.stop()
        assert self.problems == []
        assert self.engine.scheduler.pool.used_count == 0


class PrefillThread(TurningEngine):
    """A prefill engine; `kill` is what its death looks like from outside."""

    def __init__(self, decoder: Decoder, address: str, **options) -> None:
        engine = make_engine(decoder, **options)
        cache = engine.runner.cache
        engine.runner.cache = KVCache(
            decoder.spec, cache.blocks, cache.block_size, cache.key_storage.dtype, shared=True
        )
        self.sender = TransferSender(engine.runner.cache, "tiny", address)
        engine.runner.layer_teller = self.sender.layer_teller
        engine.link = self.sender
        super().__init__(engine)

    def kill(self) -> None:
        self.stop()
        self.sender.close()
        self.engine.runner.close()

    def finish(self) -> None:
        super().finish()
        self.kill()


def decode_engine(decoder: Decoder, peers: list[tuple[str, str]], **options) -> Engine:
    engine = make_engine(decoder, **options)
    engine.scheduler.transfers.receive(decoder.spec.layers, PATIENCE_S)
    engine.link = TransferReceiver(engine.runner.cache, "tiny", peers)
    return engine


def wait_for_peers(engine: Engine, count: int = 1) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while len(engine.scheduler.transfers.peers) < count:
        assert time.monotonic() < end_s, "a prefill engine did not say how busy it is"
        select.select([engine.link.news], [], [], 1.0)
        engine.exchange()


def run_split(engine: Engine, between: Callable[[int], None] | None = None) -> dict[str, RequestOutput]:
    """Until every request has ended and nothing of a transfer is left."""
    finished: dict[str, RequestOutput] = {}
    turns = 0
    while engine.has_work or engine.scheduler.transferring:
        if engine.idle or not engine.has_work:
            select.select([engine.link.news], [], [], 0.01)
        engine.exchange()
        if engine.has_work:
            finished |= {output.request_id: output for output in engine.step().finished}
        assert problems(engine.scheduler) == []
        turns += 1
        if between is not None:
            between(turns)
    assert engine.scheduler.pool.used_count == 0
    return finished


def address_in(folder: Path, transport: str, name: str = "prefill") -> str:
    return f"unix:{folder}/{name}.sock" if transport == "unix" else "tcp:127.0.0.1:0"


def close(engine: Engine) -> None:
    engine.link.close()
    engine.runner.close()
