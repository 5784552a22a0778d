"""A fleet whose size follows an autoscaling rule, in virtual time. `cumulo simulate autoscale` plays it.

The rule, the router, the scheduler and the block pool are the real ones. A replica that is ordered serves after its
start-up, and costs from the order until it has drained. Requests that come while no replica is ready wait for one:
none is refused.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cumulo.cluster.decide.autoscale.changes import ReplicaLife, changes
from cumulo.cluster.decide.autoscale.seen import FleetSeen, RoleSeen, ScalingRule
from cumulo.cluster.simulate.autoscale_result import ScaledRun, ScaleLook
from cumulo.engine.decide.routing import Ask, Router
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.fleet import Placed, PromptHashes, replica_view
from cumulo.engine.simulate.run import Arrival, Served
from cumulo.spec.slo import Slo

ROLE = "both"
_END_S = 24 * 3600.0  # after the last arrival: whatever is unanswered then will never be


@dataclass(slots=True)
class _Member:
    """One replica of the fleet, from its order until it is gone."""

    name: str
    ordered_s: float
    ready_s: float
    placed: Placed
    draining: bool = False
    judged: int = 0  # of its requests, in the order in which it took them: those before this one are over
    open: list[Served] = field(default_factory=list)
    busy_s: float = 0.0  # as of the look before

    def state(self, now_s: float) -> Literal["starting", "ready", "draining"]:
        if self.draining:
            return "draining"
        return "starting" if now_s < self.ready_s else "ready"

    @property
    def engine(self) -> SimulatedEngine:
        return self.placed.engine

    @property
    def requests(self) -> int:
        return len(self.engine.scheduler.requests) + len(self.engine.waiting_arrivals())

    def take_note(self) -> list[Served]:
        """Requests that ended since the last time."""
        served = self.engine.run.served
        self.open += served[self.judged :]
        self.judged = len(served)
        over = [one for one in self.open if one.finished or one.refused is not None]
        if over:
            self.open = [one for one in self.open if not (one.finished or one.refused is not None)]
        return over


class AutoscaledFleet:
    def __init__(
        self,
        make_engine: Callable[[], SimulatedEngine],
        router: Router,
        rule: ScalingRule,
        slo: Slo,
        start_up_s: float,
        *,
        begin_with: int = 1,
        name: str = "",
    ) -> None:
        self._make_engine, self._router, self._rule, self._slo = make_engine, router, rule, slo
        self._start_up_s = start_up_s
        self.run = ScaledRun(name)
        self._members: dict[str, _Member] = {}
        self._numbers = itertools.count()
        self._held: deque[Arrival] = deque()  # came while no replica was ready
        self._readies: list[tuple[float, str]] = []
        self._hashes: PromptHashes | None = None
        self._arrived = self._arrived_tokens = 0
        self._outputs = self._output_tokens = 0
        for _ in range(begin_with):
            self._order(0.0, ready_s=0.0)

    def serve(self, arrivals: Sequence[Arrival]) -> ScaledRun:
        """All arrivals, given in order of time, until the last is answered."""
        look_s = self._rule.interval_s
        coming = 0
        stop_s = arrivals[-1].arrived_s + _END_S
        while coming < len(arrivals) or (self._open() and look_s < stop_s):
            next_s = arrivals[coming].arrived_s if coming < len(arrivals) else float("inf")
            ready_s = self._readies[0][0] if self._readies else float("inf")
            now_s = min(next_s, ready_s, look_s)
            if now_s == ready_s:
                heapq.heappop(self._readies)
                self._place_held(now_s)
            elif now_s == next_s:
                self._arrive(arrivals[coming], now_s)
                coming += 1
            else:
                self._look(now_s)
                look_s += self._rule.interval_s
        return self._end(max(arrivals[-1].arrived_s, look_s - self._rule.interval_s))

    # -- requests -----------------------------------------------------------------------------------------
    def _arrive(self, arrival: Arrival, now_s: float) -> None:
        self.run.requests += 1
        self._arrived += 1
        self._arrived_tokens += arrival.prompt_tokens
        self._held.append(arrival)
        self._place_held(now_s)

    def _place_held(self, now_s: float) -> None:
        ready = [one for one in self._members.values() if one.state(now_s) == "ready"]
        if not ready or not self._held:
            return
        self._hashes = self._hashes or PromptHashes(ready[0].engine.scheduler.config.block_size)
        for one in ready:
            one.engine.advance(now_s)
            one.engine.clock_s = max(one.engine.clock_s, one.ready_s)
        prompt_s = min(one.engine.scheduler.costs.prompt_s_per_token for one in ready)
        while self._held:
            arrival = self._held.popleft()
            ask = Ask(arrival.prompt_tokens, self._hashes.of_arrival(arrival))
            views = [replica_view(one.name, one.placed, prompt_s) for one in ready]
            route = self._router.route(ask, views)
            placed = self._members[route.replica].placed
            placed.engine.arrivals.append(arrival)
            placed.cached_tokens.append(route.cached_tokens)

    def _open(self) -> bool:
        return bool(self._held) or any(one.requests for one in self._members.values())

    # -- replicas -----------------------------------------------------------------------------------------
    def _order(self, now_s: float, ready_s: float) -> None:
        name = f"r{next(self._numbers)}"
        self._members[name] = _Member(name, now_s, ready_s, Placed(self._make_engine()))
        heapq.heappush(self._readies, (ready_s, name))

    def _look(self, now_s: float) -> None:
        for one in self._members.values():
            one.engine.advance(now_s)
        seen = self._seen(now_s)
        self._drop_drained(now_s)
        (target,) = self._rule.decide(FleetSeen(now_s, {ROLE: seen}))
        lives = [
            ReplicaLife(one.name, one.state(now_s), one.requests, one.ordered_s)
            for one in self._members.values()
        ]
        todo = changes(lives, target.replicas)
        for _ in range(todo.start):
            self._order(now_s, now_s + self._start_up_s)
        for name in todo.take_back:
            self._members[name].draining = False
        for name in todo.drain:
            self._members[name].draining = True
        for name in todo.cancel:
            self._remove(self._members[name], now_s)
        self._drop_drained(now_s)
        self._place_held(now_s)
        added, removed = todo.start + len(todo.take_back), len(todo.drain) + len(todo.cancel)
        self.run.note_change(ROLE, added - removed)
        self.run.most = max(self.run.most, len(self._members))
        self.run.looks.append(
            ScaleLook(
                now_s, ROLE, seen.ready, seen.starting, target.replicas, seen.arrived, seen.waiting, seen.ended,
                seen.ended_in_slo, target.why,
            )
        )  # fmt: skip

    def _drop_drained(self, now_s: float) -> None:
        for one in [one for one in self._members.values() if one.draining and not one.requests]:
            # It was empty when its last request ended, which may be a while ago.
            self._remove(one, min(now_s, max(one.engine.clock_s, one.ready_s, now_s - self._rule.interval_s)))

    def _remove(self, member: _Member, now_s: float) -> None:
        self._judge(member.take_note())
        del self._members[member.name]
        self._readies = [one for one in self._readies if one[1] != member.name]
        heapq.heapify(self._readies)
        self._router.forget(member.name)
        self._cost(member, now_s)

    def _cost(self, member: _Member, until_s: float) -> None:
        self.run.replica_s[ROLE] = self.run.replica_s.get(ROLE, 0.0) + max(0.0, until_s - member.ordered_s)

    def _end(self, now_s: float) -> ScaledRun:
        for one in list(self._members.values()):
            self._remove(one, now_s)
        self.run.ended_s = now_s
        return self.run

    # -- what the rule sees -------------------------------------------------------------------------------
    def _seen(self, now_s: float) -> RoleSeen:
        ended = kept = waiting = running = tokens = 0
        busy_s, ready = 0.0, 0
        for one in self._members.values():
            over = one.take_note()
            ended += len(over)
            kept += self._judge(over)
            coming = one.engine.waiting_arrivals()
            begun = sum(request.first_token_s is not None for request in one.open)
            waiting += len(one.open) - begun + len(coming)
            running += begun
            tokens += sum(arrival.prompt_tokens for arrival in coming)
            tokens += sum(
                max(0, request.prompt_length - request.sequences[0].computed)
                for request in one.engine.scheduler.requests.values()
            )
            if one.state(now_s) == "ready":
                ready += 1
                busy_s += one.engine.run.device_busy_s - one.busy_s
            one.busy_s = one.engine.run.device_busy_s
        seen = RoleSeen(
            ready=ready,
            starting=sum(one.state(now_s) == "starting" for one in self._members.values()),
            arrived=self._arrived,
            arrived_prompt_tokens=self._arrived_tokens,
            waiting=waiting + len(self._held),
            waiting_prompt_tokens=tokens + sum(one.prompt_tokens for one in self._held),
            running=running,
            mean_output_tokens=self._output_tokens / self._outputs if self._outputs else 0.0,
            busy=min(1.0, busy_s / (max(1, ready) * self._rule.interval_s)),
            ended=ended,
            ended_in_slo=kept,
        )
        self._arrived = self._arrived_tokens = 0
        return seen

    def _judge(self, over: list[Served]) -> int:
        kept = 0
        for one in over:
            if not one.finished or one.first_token_s is None or one.last_token_s is None:
                continue
            arrival = one.arrival
            self._outputs += 1
            self._output_tokens += arrival.output_tokens
            self.run.answered += 1
            ttft_s = one.first_token_s - arrival.arrived_s
            self.run.ttft_s.append(ttft_s)
            kept += keeps(self._slo, ttft_s, one.last_token_s - one.first_token_s, arrival.output_tokens)
        self.run.in_slo += kept
        return kept


def keeps(slo: Slo, ttft_s: float, rest_s: float, output_tokens: int) -> bool:
    """Whether a request kept the SLO; `rest_s`: from its first token to its last."""
    tpot_s = rest_s / max(1, output_tokens - 1)
    bounds = ((slo.ttft_s, ttft_s), (slo.tpot_s, tpot_s), (slo.e2e_s, ttft_s + rest_s))
    return all(bound is None or value <= bound for bound, value in bounds)
