"""TransferSender: a prefill engine's side of KV transfers. A thread that takes orders from decode engines, tells
them what has been computed, layer by layer, and lets them read the cache. Owned by the engine; it decides nothing.
"""

import contextlib
import hmac
import logging
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cumulo.engine.decide.plan import Send, StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.transfer.orders import (
    LOAD_EVERY_S,
    ComputeOrder,
    PeerLoad,
    ReleaseOrder,
    SenderEvent,
)
from cumulo.engine.play.mailbox import Mailbox
from cumulo.engine.play.transfer_cuda import CudaExport
from cumulo.engine.play.transfer_stream import StreamExport
from cumulo.engine.play.transfer_wire import (
    BROKEN,
    LONGEST,
    Greeting,
    LayersDone,
    SentCache,
    Word,
    WordReader,
    greeting_of,
    open_socket,
    pack,
)
from cumulo.errors import CumuloError

log = logging.getLogger(__name__)
_MOST_STRANGERS = 64  # connections that have not greeted: when there are more, the oldest ends


class _Receiver:
    """One decode engine that is connected."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.socket = number, connection
        self.reader, self.outgoing = WordReader(), bytearray()
        self.greeted = False
        self.orders: set[int] = set()


class TransferSender:
    def __init__(self, cache: SentCache, model: str, address: str, key: str = "") -> None:
        self._greeting, self._key = greeting_of(cache, model), key
        on_one_host = address.startswith("unix:") and cache.key_storage.is_cuda
        self._export = CudaExport(cache) if on_one_host else StreamExport(cache)
        self._listener, where = open_socket(address)
        self._path = where if self._listener.family == socket.AF_UNIX else None
        if self._path is None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            with contextlib.suppress(FileNotFoundError):
                Path(self._path).unlink()
        try:
            self._listener.bind(where)
        except OSError as error:
            raise CumuloError(f"no engine can be reached at {address}: {error.strerror or error}") from None
        self._listener.listen()
        self.address = address if self._path is not None else _bound(self._listener, address)
        self.news: Mailbox[SenderEvent] = Mailbox()
        self.words: Mailbox[tuple[str, Word] | PeerLoad | None] = Mailbox()
        self._receivers: dict[int, _Receiver] = {}
        self._selector = selectors.DefaultSelector()
        self._connections = 0
        self._layers = cache.spec.layers
        self._cache = cache
        self._told_load_s = float("-inf")
        self.before_told: Callable[[], None] = lambda: None  # waits until all ranks have computed ended steps
        self._thread = threading.Thread(target=self._run, name="cumulo-transfer", daemon=True)
        self._thread.start()

    @property
    def staged(self) -> bool:
        """Whether KV of a GPU goes over a network."""
        return isinstance(self._export, StreamExport) and self._cache.key_storage.is_cuda

    # -- for the engine and its runner --------------------------------------------------------------------
    def exchange(self, scheduler: Scheduler, now_s: float) -> None:
        """Take news in, and hand out what the scheduler wants done. Called between two steps, so that the scheduler
        is changed by one thread only."""
        for key, order in self.news.take_all():
            if order is not None:
                scheduler.take_order(key, order, now_s)
            else:
                scheduler.prefilling.release(key, now_s)
        if answers := scheduler.prefilling.answers:
            self.words.put_all(answers)
            answers.clear()
        if now_s - self._told_load_s >= LOAD_EVERY_S:
            self._told_load_s = now_s
            self.words.put(scheduler.prefilling.load())

    def step_done(self, plan: StepPlan) -> None:
        """A step has been computed. Runners that do not tell of single layers tell of all of them here."""
        if plan.sends:
            self.before_told()
            self.layer_teller(plan.sends)(self._layers - 1)

    def layer_teller(self, sends: list[Send]) -> Callable[[int], None]:
        """What a runner calls after each layer of a step that has these rows."""
        numbers = [(send.key, int(send.key.partition(".")[2]), send.tokens) for send in sends]

        def tell(layer: int) -> None:
            self.words.put_all(
                (key, LayersDone(number, layer + 1, tokens)) for key, number, tokens in numbers
            )

        return tell

    def close(self) -> None:
        self.words.put(None)
        self._thread.join()
        self.news.close()

    # -- the thread ---------------------------------------------------------------------------------------
    def _run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self.words, selectors.EVENT_READ, None)
        while True:
            for ready, _ in self._selector.select():
                if isinstance(ready.data, _Receiver):
                    self._serve(ready.data)
                elif ready.data is not None:
                    ready.data()
            for word in self.words.take_all():
                if word is None:
                    self._end()
                    return
                if isinstance(word, PeerLoad):
                    for receiver in list(self._receivers.values()):
                        if receiver.greeted:
                            self._send(receiver, pack(word))
                else:
                    key, said = word
                    if (one := self._receivers.get(int(key.partition(".")[0]))) is not None:
                        self._send(one, pack(said))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._connections += 1
            receiver = self._receivers[self._connections] = _Receiver(self._connections, connection)
            self._selector.register(connection, selectors.EVENT_READ, receiver)
        strangers = [one for one in self._receivers.values() if not one.greeted]
        if len(strangers) > _MOST_STRANGERS:
            self._drop(strangers[0], TimeoutError("it does not say who it is"))

    def _serve(self, receiver: _Receiver) -> None:
        try:
            if receiver.outgoing:
                self._flush(receiver)
            try:
                data = receiver.socket.recv(1 << 20)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionError("it is gone")
            for word in receiver.reader.feed(data):
                if self._take(receiver, word):
                    return
        except BROKEN as error:
            self._drop(receiver, error)

    def _take(self, receiver: _Receiver, word: Word) -> bool:
        """True if this connection is served by somebody else from now on."""
        if isinstance(word, Greeting) and not receiver.greeted:
            return self._greet(receiver, word)
        if not receiver.greeted:
            raise CumuloError("it does not begin with a greeting")
        if isinstance(word, ComputeOrder):
            receiver.orders.add(word.number)
            self.news.put(SenderEvent(f"{receiver.number}.{word.number}", word))
        elif isinstance(word, ReleaseOrder):
            receiver.orders.discard(word.number)
            self.news.put(SenderEvent(f"{receiver.number}.{word.number}", None))
        return False

    def _greet(self, receiver: _Receiver, word: Greeting) -> bool:
        refusal = self._greeting.differs_from(word)
        if not hmac.compare_digest(str(word.key).encode(), self._key.encode()):
            refusal = "its fleet key is another: start all engines of a fleet with the same key"
        if refusal:
            log.error("a decode engine was refused: %s", refusal)
            self._send(receiver, pack(replace(self._greeting, refusal=refusal)))
            return False
        if word.transport == "stream" and isinstance(self._export, StreamExport):  # a connection for blocks
            self._selector.unregister(receiver.socket)
            del self._receivers[receiver.number]
            receiver.socket.setblocking(True)
            threading.Thread(target=self._export.serve, args=(receiver.socket,), daemon=True).start()
            return True
        receiver.greeted, receiver.reader.longest = True, LONGEST
        answer = replace(self._greeting, transport=self._export.name, reach=self._export.reach())
        self._send(receiver, pack(answer))
        return False

    def _send(self, receiver: _Receiver, frame: bytes) -> None:
        receiver.outgoing += frame
        try:
            self._flush(receiver)
        except OSError as error:
            self._drop(receiver, error)

    def _flush(self, receiver: _Receiver) -> None:
        with contextlib.suppress(BlockingIOError):
            while receiver.outgoing:
                del receiver.outgoing[: receiver.socket.send(receiver.outgoing)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if receiver.outgoing else 0)
        self._selector.modify(receiver.socket, wanted, receiver)

    def _drop(self, receiver: _Receiver, error: Exception) -> None:
        """A decode engine is gone: nobody reads what is held for it."""
        if self._receivers.pop(receiver.number, None) is None:
            return
        log.info("a decode engine left: %s", error)
        self._selector.unregister(receiver.socket)
        receiver.socket.close()
        self.news.put_all(SenderEvent(f"{receiver.number}.{number}", None) for number in receiver.orders)

    def _end(self) -> None:
        for receiver in list(self._receivers.values()):
            self._selector.unregister(receiver.socket)
            receiver.socket.close()
        self._listener.close()
        self._selector.close()
        self.words.close()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                Path(self._path).unlink()


def _bound(listener: socket.socket, address: str) -> str:
    """With the port that the system chose, where 0 was asked for."""
    return f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
