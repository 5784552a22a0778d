"""Links to other engines: what passes between an engine's scheduler and its transfer thread. Called by the engine's
loop between two steps, so that the scheduler's books are changed by one thread only.
"""

from typing import Protocol

from cumulo.engine.decide import handover
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.request import Request
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.transfer import LOAD_EVERY_S, Ordered, OrderFailed
from cumulo.engine.play.transfer_receiver import TransferReceiver
from cumulo.engine.play.transfer_sender import TransferSender
from cumulo.errors import InvalidRequest

_NOTHING_DRAWN = SamplingParams(max_tokens=1, temperature=0)


class EngineLink(Protocol):
    def exchange(self, now_s: float) -> None:
        """Take news in, and hand out what the scheduler wants done."""
        ...

    def fileno(self) -> int:
        """Readable when there may be news."""
        ...

    def close(self) -> None: ...


class PrefillLink:
    """Of an engine that computes prompts for others."""

    def __init__(self, scheduler: Scheduler, sender: TransferSender) -> None:
        self._scheduler, self._sender = scheduler, sender
        self._told_s = float("-inf")

    def exchange(self, now_s: float) -> None:
        for event in self._sender.news.take():
            if isinstance(event, Ordered):
                self._accept(event, now_s)
            else:
                handover.release(self._scheduler.books, event.key, now_s)
        transfers = self._scheduler.transfers
        if transfers.answers:
            self._sender.give(transfers.answers[:])
            transfers.answers.clear()
        if now_s - self._told_s >= LOAD_EVERY_S:
            self._told_s = now_s
            self._sender.tell_load(handover.load(self._scheduler.books))

    def _accept(self, event: Ordered, now_s: float) -> None:
        order = event.order
        try:
            request = Request(
                event.key, order.tokens, _NOTHING_DRAWN, seed=0, priority=order.priority,
                cache_salt=order.cache_salt, tenant=order.tenant, arrived_s=now_s,
            )  # fmt: skip
            request.sends = True
            self._scheduler.add(request)
        except InvalidRequest as error:
            self._sender.give([(event.key, OrderFailed(order.number, str(error)))])
        else:
            handover.accept(self._scheduler.books, request.sequences[0], order.number)

    def fileno(self) -> int:
        return self._sender.news.fileno()

    def close(self) -> None:
        self._sender.close()


class DecodeLink:
    """Of an engine whose prompts are computed by others."""

    def __init__(self, scheduler: Scheduler, receiver: TransferReceiver, layers: int) -> None:
        self._scheduler, self._receiver = scheduler, receiver
        scheduler.transfers.receives, scheduler.transfers.layers = True, layers

    def exchange(self, now_s: float) -> None:
        for event in self._receiver.news.take():
            handover.enter_event(self._scheduler.books, event, now_s)
        transfers = self._scheduler.transfers
        if transfers.orders:
            self._receiver.give(transfers.orders[:])
            transfers.orders.clear()

    def fileno(self) -> int:
        return self._receiver.news.fileno()

    def close(self) -> None:
        self._receiver.close()
