"""Prefill and decode on engines of their own, in virtual time. Called by the planner for `cumulo simulate serve
--prefill --decode`.

Every engine has the real scheduler, and decode engines order prompts from prefill engines by the real decisions
(engine/decide/transfer); only steps and copies take their time from models. Engines are played in
the order of their clocks, a step at a time. A copy follows its prompt layer by layer: a layer of a step is done
when its share of the step's time has passed. Blocks come over one link of each decode engine, one order after the
other.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from functools import partial

from cumulo.engine.decide.routing import Ask, Router
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.transfer.orders import (
    ComputeOrder,
    CopyStopped,
    Landed,
    Order,
    ReceiverEvent,
    TransferPlan,
)
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.fleet import engine_view, prefix_hashes
from cumulo.engine.simulate.run import Arrival, Run, Served, StepClock

_NUMBERS = 1 << 20  # of one decode engine's requests: prompts of two engines must differ


@dataclass(frozen=True, slots=True)
class KVLink:
    """What KV travels over to a decode engine."""

    bytes_per_s: float
    kv_bytes_per_token: float
    layers: int
    latency_s: float = 2e-5  # of a word between two engines

    def copy_s(self, tokens: int) -> float:
        return tokens * self.kv_bytes_per_token / self.bytes_per_s


class SplitPrefill(SimulatedEngine):
    """Computes orders, and knows when each layer of each chunk is done."""

    def __init__(self, name: str, scheduler: Scheduler, cost: StepClock) -> None:
        super().__init__(scheduler, cost, step_by_step=True)
        self.name = name
        self.chunks: dict[str, list[tuple[int, float, float]]] = {}  # tokens, beginning and end of its step
        self.on_chunk: Callable[[str], None] = lambda key: None
        self.ordered_tokens = 0

    def accept(self, key: str, order: ComputeOrder) -> None:
        arrived_s, tokens = self.clock_s, len(order.tokens)
        self.clock_s += self.cost.arrival_s(tokens)
        if self.scheduler.take_order(key, order, arrived_s, Served(Arrival(arrived_s, tokens, 1))):
            self.chunks[key] = []
            self.ordered_tokens += tokens

    def _step(self) -> None:
        super()._step()
        step = self._in_flight[-1] if self._in_flight else None
        for send in step.plan.sends if step is not None else ():
            known = self.chunks.get(send.key)
            if known is not None and (not known or known[-1][0] < send.tokens):
                assert step is not None
                known.append((send.tokens, step.done_s - step.time.device_s, step.done_s))
                self.on_chunk(send.key)


class SplitDecode(SimulatedEngine):
    def __init__(self, number: int, scheduler: Scheduler, cost: StepClock, layers: int) -> None:
        super().__init__(scheduler, cost, step_by_step=True)
        self.name, self.first_number = f"decode-{number}", number * _NUMBERS
        self.link_free_s = 0.0
        self.before_arrival: Callable[[], None] = lambda: None
        scheduler.transfers.receive(layers, stall_s=float("inf"))  # nothing stands still here

    def _take(self, arrival: Arrival) -> None:
        self.before_arrival()
        super()._take(arrival)


@dataclass(slots=True)
class _Ordering:
    """One order on its way through both engines."""

    decode: SplitDecode
    prefill: SplitPrefill
    order: ComputeOrder
    key: str
    plan: TransferPlan | None = None
    fetch_s: float = 0.0
    landed: bool = False


@dataclass(slots=True)
class SplitFleet:
    prefill: list[SplitPrefill]
    decode: list[SplitDecode]
    link: KVLink
    _orders: dict[tuple[str, int], _Ordering] = field(default_factory=dict)
    _by_key: dict[str, _Ordering] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for one in self.prefill:
            one.on_chunk = self._land_if_known
        for decode in self.decode:
            decode.before_arrival = partial(self._tell_loads, decode)

    def serve(self, arrivals: ListLike[Arrival], router: Router) -> list[Run]:
        """All arrivals, given in order of time; returns the decode engines' runs."""
        size = self.decode[0].scheduler.config.block_size
        for arrival in arrivals:
            self._play_until(arrival.arrived_s)
            ask = Ask(arrival.prompt_tokens, prefix_hashes(arrival, size))
            views = [
                engine_view(one.name, one, 0, one.scheduler.costs.prompt_s_per_token) for one in self.decode
            ]
            route = router.route(ask, views)
            next(one for one in self.decode if one.name == route.replica).arrivals.append(arrival)
        self._play_until(float("inf"))
        return [one.end() for one in self.decode]

    def _play_until(self, until_s: float) -> None:
        engines: list[SplitPrefill | SplitDecode] = [*self.prefill, *self.decode]
        while True:
            engine = min(engines, key=lambda one: one.next_s)
            if engine.next_s >= until_s:
                return
            engine.turn(until_s)
            if isinstance(engine, SplitDecode):
                self._carry_out(engine)
            else:
                self._answer(engine)

    # -- words between engines ----------------------------------------------------------------------------
    def _tell_loads(self, decode: SplitDecode) -> None:
        """Prefill engines' loads as of now. Real engines hear them a few times a second."""
        for one in self.prefill:
            word = replace(one.scheduler.prefilling.load(), peer=one.name)
            decode.scheduler.transfers.enter_event(word, decode.clock_s)

    def _carry_out(self, decode: SplitDecode) -> None:
        transfers = decode.scheduler.transfers
        orders, transfers.orders = transfers.orders, []
        for order in orders:
            self._carry_out_one(decode, order, decode.clock_s + self.link.latency_s)

    def _carry_out_one(self, decode: SplitDecode, order: Order, then_s: float) -> None:
        if isinstance(order, ComputeOrder):
            prefill = next(one for one in self.prefill if one.name == order.peer)
            key = f"{decode.name}.{order.number}"
            made = _Ordering(decode, prefill, order, key)
            self._orders[decode.name, order.number] = self._by_key[key] = made
            prefill.post(then_s, lambda: prefill.accept(key, order))
        elif isinstance(order, TransferPlan):
            made = self._orders[decode.name, order.number]
            made.plan, made.fetch_s = order, decode.clock_s
            self._land_if_known(made.key)
        else:
            made = self._orders.pop((decode.name, order.number))
            del self._by_key[made.key]
            made.prefill.post(then_s, lambda: self._release(made))
            self._tell(made, CopyStopped(order.number, 0), decode.clock_s)

    def _release(self, made: _Ordering) -> None:
        made.prefill.chunks.pop(made.key, None)
        made.prefill.scheduler.prefilling.release(made.key, made.prefill.clock_s)

    def _answer(self, prefill: SplitPrefill) -> None:
        prefilling = prefill.scheduler.prefilling
        answers, prefilling.answers = prefilling.answers, []
        for key, answer in answers:
            if (made := self._by_key.get(key)) is not None:
                self._tell(made, replace(answer, peer=prefill.name))

    def _tell(self, made: _Ordering, event: ReceiverEvent, time_s: float | None = None) -> None:
        decode = made.decode
        when_s = made.prefill.clock_s if time_s is None else time_s
        decode.post(
            when_s + self.link.latency_s,
            lambda: decode.scheduler.transfers.enter_event(event, decode.clock_s),
        )

    # -- copies -------------------------------------------------------------------------------------------
    def _land_if_known(self, key: str) -> None:
        """When the last block arrives: known once the last chunk's step is, and copying has begun."""
        made = self._by_key.get(key)
        if made is None or made.plan is None or made.landed:
            return
        plan, chunks = made.plan, made.prefill.chunks.get(key, [])
        if not chunks or chunks[-1][0] < plan.tokens:
            return
        made.landed = True
        # Of a chunk, what lies in blocks that are here already is not copied.
        held, copied_s, began = plan.held_blocks * made.prefill.scheduler.config.block_size, 0.0, 0
        now_s = max(made.decode.link_free_s, made.fetch_s)
        for tokens, begin_s, done_s in chunks:
            copy_s = self.link.copy_s(max(0, tokens - max(began, held)))
            layer_s, layers = (done_s - begin_s) / self.link.layers, self.link.layers
            # The link is never ahead of the layers, and works one layer after the other.
            now_s = max(now_s + copy_s, begin_s + layer_s + copy_s, done_s + copy_s / layers)
            copied_s += copy_s
            began = tokens
        made.decode.link_free_s = now_s
        moved = int(copied_s * self.link.bytes_per_s)
        tail_s = max(0.0, now_s - chunks[-1][2])
        self._tell(made, Landed(plan.number, tail_s, moved, copied_s), now_s)
