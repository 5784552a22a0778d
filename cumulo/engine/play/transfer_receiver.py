"""TransferReceiver: a decode engine's side of KV transfers. A thread that hands orders to prefill engines and
copies what they have computed into this engine's cache, piece by piece. Owned by the engine; it decides nothing.

One thread does both, so that a transfer that was given up is no longer written to once that is said.
"""

import logging
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.transfer.orders import (
    ComputeOrder,
    CopyMoved,
    CopyStopped,
    Landed,
    Order,
    OrderBegun,
    OrderFailed,
    PeerLoad,
    PeerLost,
    ReceiverEvent,
    TransferPlan,
    TransferProgress,
)
from cumulo.engine.play.mailbox import Mailbox
from cumulo.engine.play.transfer_cuda import BlockSource, CudaSource
from cumulo.engine.play.transfer_stream import StreamSource
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

_RETRY_S = 0.3  # between attempts to reach a prefill engine
_GREETING_S = 10.0  # the longest wait for its first word
_PIECE_BYTES = 16 << 20  # of one layer
_TELL_EVERY_S = 0.25  # that a long transfer moves


@dataclass(slots=True)
class _Sender:
    """One prefill engine: connected, or tried again and again."""

    name: str
    address: str
    connection: socket.socket | None = None
    source: BlockSource | None = None
    reader: WordReader = field(default_factory=WordReader)
    # Orders that it took on this connection and that have no blocks here yet, with what it has said of them
    early: dict[int, list[LayersDone]] = field(default_factory=dict)
    retry_s: float = 0.0  # the clock's time of the next attempt
    complaint: str = ""


@dataclass(slots=True)
class _Copying:
    progress: TransferProgress
    sender: _Sender
    source: BlockSource | None  # None: the connection on which it was ordered is lost
    computed_s: float | None = None  # when the last layer was
    copied_bytes: int = 0
    copying_s: float = 0.0
    told_s: float = 0.0


class TransferReceiver:
    def __init__(self, cache: SentCache, model: str, peers: Sequence[tuple[str, str]], key: str = "") -> None:
        self._cache, self._greeting = cache, replace(greeting_of(cache, model), key=key)
        self._senders = {name: _Sender(name, address) for name, address in peers}
        self.news: Mailbox[ReceiverEvent] = Mailbox()
        self.orders: Mailbox[Order | None] = Mailbox()
        self._copying: dict[int, _Copying] = {}
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="cumulo-transfer", daemon=True)
        self._thread.start()

    # -- for the engine -----------------------------------------------------------------------------------
    def exchange(self, scheduler: Scheduler, now_s: float) -> None:
        """Take news in, and hand out what the scheduler wants done. Called between two steps, so that the scheduler
        is changed by one thread only."""
        for event in self.news.take_all():
            scheduler.transfers.enter_event(event, now_s)
        if orders := scheduler.transfers.orders:
            self.orders.put_all(orders)
            orders.clear()

    def step_done(self, plan: StepPlan) -> None:
        """Nobody waits for this engine's steps."""

    def close(self) -> None:
        self.orders.put(None)
        self._thread.join()
        self.news.close()

    # -- the thread ---------------------------------------------------------------------------------------
    def _run(self) -> None:
        self._selector.register(self.orders, selectors.EVENT_READ, None)
        while True:
            busy = self._copy_pieces()
            apart = any(one.connection is None for one in self._senders.values())
            for ready, _ in self._selector.select(0 if busy else _RETRY_S if apart else None):
                if ready.data is not None:
                    self._listen(ready.data)
            for order in self.orders.take_all():
                if order is None:
                    self._end()
                    return
                self._take_order(order)
            if apart:
                self._reconnect()

    def _take_order(self, order: Order) -> None:
        if isinstance(order, TransferPlan):
            sender = self._senders[order.source]
            early = sender.early.pop(order.number, None)
            if early is None:
                return  # its sender was lost meanwhile; who is connected by now never took the order
            copying = self._copying[order.number] = _Copying(TransferProgress(order), sender, sender.source)
            for word in early:
                self._note(copying, word)
            return
        sender = self._senders[order.peer]
        if isinstance(order, ComputeOrder):
            if sender.connection is None:
                why = sender.complaint or "it cannot be reached"
                self.news.put(OrderFailed(order.number, why, order.peer))
            else:
                sender.early[order.number] = []
                self._send(sender, order)
            return
        sender.early.pop(order.number, None)
        stopped = self._copying.pop(order.number, None)
        self._send(sender, order)
        self.news.put(CopyStopped(order.number, stopped.progress.complete_blocks if stopped else 0))

    def _send(self, sender: _Sender, word: Word) -> None:
        if sender.connection is not None:
            try:
                sender.connection.sendall(pack(word))
            except OSError as error:
                self._lose(sender, _reason(error))

    # -- copying ------------------------------------------------------------------------------------------
    def _copy_pieces(self) -> bool:
        """Some of every transfer that has something ready; True if there was any."""
        busy = False
        for number, copying in list(self._copying.items()):
            if copying.source is not None and self._copy_some(number, copying, copying.source):
                busy = True
        return busy

    def _copy_some(self, number: int, copying: _Copying, source: BlockSource) -> bool:
        began_s, before = time.perf_counter(), copying.copied_bytes
        piece_bytes = max(_PIECE_BYTES, source.turn_bytes)
        most_blocks = max(1, piece_bytes // max(1, sum(self._greeting.block_bytes)))
        try:
            while copying.copied_bytes - before < source.turn_bytes:
                piece = copying.progress.next_piece(most_blocks, source.turn_layers)
                if piece is None:
                    break
                copying.copied_bytes += source.read(piece)
            if copying.copied_bytes == before:
                return False
            source.settle()
        except OSError as error:
            copying.progress = TransferProgress(copying.progress.plan)  # how much of it came is unknown
            self._lose(copying.sender, _reason(error))
            return True
        now_s = time.perf_counter()
        copying.copying_s += now_s - began_s
        if copying.progress.done:
            del self._copying[number]
            tail_s = now_s - (copying.computed_s or now_s)
            self.news.put(Landed(number, tail_s, copying.copied_bytes, copying.copying_s))
        elif now_s - copying.told_s > _TELL_EVERY_S:
            copying.told_s = now_s
            self.news.put(CopyMoved(number))
        return True

    def _note(self, copying: _Copying, word: LayersDone) -> None:
        plan = copying.progress.plan
        copying.progress.computed(word.layers, word.tokens)
        if word.layers == plan.layers and word.tokens >= plan.tokens:
            copying.computed_s = time.perf_counter()

    # -- what prefill engines say -------------------------------------------------------------------------
    def _listen(self, sender: _Sender) -> None:
        if sender.connection is None:
            return
        try:
            data = sender.connection.recv(1 << 20)
            if not data:
                raise ConnectionError("its process ended or closed the connection")
            for word in sender.reader.feed(data):
                self._take_word(sender, word)
        except BROKEN as error:
            self._lose(sender, _reason(error))

    def _take_word(self, sender: _Sender, word: Word) -> None:
        if isinstance(word, LayersDone):
            copying = self._copying.get(word.number)
            if copying is not None:
                self._note(copying, word)
            elif word.number in sender.early:
                sender.early[word.number].append(word)
        elif isinstance(word, OrderBegun):
            # What it found in its cache is there in every layer.
            self._take_word(sender, LayersDone(word.number, self._greeting.layers, word.cached_tokens))
            self.news.put(replace(word, peer=sender.name))
        elif isinstance(word, OrderFailed | PeerLoad):
            self.news.put(replace(word, peer=sender.name))

    def _lose(self, sender: _Sender, why: str) -> None:
        if sender.connection is None:
            return
        log.warning("the prefill engine %s is lost: %s", sender.name, why)
        self._selector.unregister(sender.connection)
        sender.connection.close()
        if sender.source is not None:
            sender.source.close()
        sender.connection = sender.source = None
        sender.early.clear()
        for copying in self._copying.values():
            if copying.sender is sender:
                copying.source = None  # the next one at this address has other blocks there
        sender.retry_s, sender.complaint = time.monotonic() + _RETRY_S, why
        self.news.put(PeerLost(sender.name, why))

    # -- connecting ---------------------------------------------------------------------------------------
    def _reconnect(self) -> None:
        for sender in self._senders.values():
            if sender.connection is None and time.monotonic() >= sender.retry_s:
                try:
                    self._connect(sender)
                except BROKEN as error:
                    if not isinstance(error, OSError) and sender.complaint != _reason(error):
                        log.error("the prefill engine %s is of no use: %s", sender.name, error)
                        self.news.put(PeerLost(sender.name, str(error)))
                    sender.complaint = _reason(error)
                    sender.retry_s = time.monotonic() + _RETRY_S

    def _connect(self, sender: _Sender) -> None:
        connection, where = open_socket(sender.address)
        try:
            connection.settimeout(_GREETING_S)
            connection.connect(where)
            connection.sendall(pack(self._greeting))
            sender.reader, word = WordReader(), None
            sender.reader.longest = LONGEST
            while word is None:
                if not (data := connection.recv(1 << 16)):
                    raise ConnectionError("it closed the connection")
                words = list(sender.reader.feed(data))
                word = words[0] if words else None
            if not isinstance(word, Greeting):
                raise CumuloError("it does not begin with a greeting")
            if word.refusal or (refusal := self._greeting.differs_from(word)):
                raise CumuloError(word.refusal or refusal)
            sender.source = self._open(sender, word)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(_GREETING_S)  # of a sender that takes no orders: it is lost then
        sender.connection, sender.complaint = connection, ""
        self._selector.register(connection, selectors.EVENT_READ, sender)
        for word in words[1:]:
            self._take_word(sender, word)
        log.info("connected to the prefill engine %s (%s)", sender.name, type(sender.source).__name__)

    def _open(self, sender: _Sender, greeting: Greeting) -> BlockSource:
        if greeting.transport == "cuda":
            return CudaSource(self._cache, greeting.reach or {})
        return StreamSource(self._cache, sender.address, pack(replace(self._greeting, transport="stream")))

    def _end(self) -> None:
        for sender in self._senders.values():
            if sender.connection is not None:
                sender.connection.close()
            if sender.source is not None:
                sender.source.close()
        self._selector.close()
        self.orders.close()


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
