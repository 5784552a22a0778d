"""Links to other engines: what passes between an engine's scheduler and its transfer thread. Called by the engine's
loop between two steps, so that the scheduler is changed by one thread only.
"""

from collections.abc import Callable

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.transfer.orders import LOAD_EVERY_S, Ordered, named_addresses
from cumulo.engine.play.player import Player
from cumulo.engine.play.ranked_runner import RankedRunner
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.engine.play.transfer_receiver import TransferReceiver
from cumulo.engine.play.transfer_sender import TransferSender
from cumulo.engine.play.transfer_wire import RankCaches, SentCache
from cumulo.errors import ConfigError
from cumulo.models.batch import KVCache


def connect(
    scheduler: Scheduler, player: Player, config: EngineConfig, model: str
) -> "PrefillLink | DecodeLink | None":
    """The link that an engine's role asks for."""
    if config.role == "both":
        return None
    runner = player.runner
    ranked = runner if isinstance(runner, RankedRunner) else None
    cache: SentCache | None = getattr(runner, "cache", None) if ranked is None else ranked.caches
    if not isinstance(cache, KVCache | RankCaches):
        raise ConfigError(
            f"role={config.role} needs an engine whose KV cache is in its own process: omit role"
        )
    if config.role == "prefill":
        sender = TransferSender(cache, model, config.transfer_address, config.transfer_key)
        # On one host all layers of a GPU's step go in one copy; over a network each leaves when it is computed.
        if isinstance(runner, TorchRunner) or (ranked is None and sender.staged):
            runner.layer_teller = sender.layer_teller  # type: ignore[attr-defined]
        before_told = ranked.wait_for_ranks if ranked is not None else None
        return PrefillLink(scheduler, sender, cache.spec.layers, before_told)
    peers = named_addresses(config.prefill_engines)
    receiver = TransferReceiver(cache, model, peers, config.transfer_key)
    scheduler.handover.receive(cache.spec.layers, config.transfer_stall_s)
    return DecodeLink(scheduler, receiver)


class PrefillLink:
    """The link of an engine that computes prompts for others."""

    def __init__(
        self,
        scheduler: Scheduler,
        sender: TransferSender,
        layers: int,
        before_told: Callable[[], None] | None = None,
    ) -> None:
        """`before_told`: returns when the steps that have ended have been computed by everybody."""
        self._scheduler, self._sender, self._layers = scheduler, sender, layers
        self._before_told = before_told
        self._told_s = float("-inf")

    def exchange(self, now_s: float) -> None:
        """Take news in, and hand out what the scheduler wants done."""
        for event in self._sender.news.take_all():
            if isinstance(event, Ordered):
                self._scheduler.take_order(event.key, event.order, now_s)
            else:
                self._scheduler.handover.release(event.key, now_s)
        transfers = self._scheduler.transfers
        if transfers.answers:
            self._sender.give(transfers.answers[:])
            transfers.answers.clear()
        if now_s - self._told_s >= LOAD_EVERY_S:
            self._told_s = now_s
            self._sender.tell_load(self._scheduler.handover.load())

    def step_done(self, plan: StepPlan) -> None:
        """A step has been computed. Runners that do not tell of single layers tell of all of them here."""
        if plan.sends:
            if self._before_told is not None:
                self._before_told()
            self._sender.layer_teller(plan.sends)(self._layers - 1)

    def fileno(self) -> int:
        """Readable when there may be news."""
        return self._sender.news.fileno()

    def close(self) -> None:
        self._sender.close()


class DecodeLink:
    """The link of an engine whose prompts are computed by others."""

    def __init__(self, scheduler: Scheduler, receiver: TransferReceiver) -> None:
        self._scheduler, self._receiver = scheduler, receiver

    def exchange(self, now_s: float) -> None:
        for event in self._receiver.news.take_all():
            self._scheduler.handover.enter_event(event, now_s)
        transfers = self._scheduler.transfers
        if transfers.orders:
            self._receiver.give(transfers.orders[:])
            transfers.orders.clear()

    def step_done(self, plan: StepPlan) -> None:
        pass

    def fileno(self) -> int:
        return self._receiver.news.fileno()

    def close(self) -> None:
        self._receiver.close()
