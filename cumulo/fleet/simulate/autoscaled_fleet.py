"""A fleet whose size follows an autoscaling rule, in virtual time. `cumulo simulate autoscale` plays it.

The rule and the router are the real ones. A replica that is ordered serves after its start-up, and costs from the
order until it has drained. Requests that come while no replica is ready wait for one: none is refused. With the
roles prefill and decode, a prompt's keys and values travel to a decode replica when its first token is drawn.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cumulo.engine.decide.routing import Ask, Router
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.fleet import prefix_hashes, replica_view
from cumulo.engine.simulate.run import Arrival, Served
from cumulo.fleet.decide.scaling import FleetSeen, ReplicaLife, RoleSeen, ScaleTo, ScalingRule, changes
from cumulo.spec.slo import Slo


@dataclass(frozen=True, slots=True)
class ScaleLook:
    """What the rule saw and wanted at one moment, for the picture."""

    time_s: float
    role: str
    ready: int
    starting: int
    wanted: int
    arrived: int  # requests since the look before
    waiting: int
    ended: int
    ended_in_slo: int
    why: str


@dataclass(slots=True)
class ScaledRun:
    """What an autoscaling rule made of a trace: cost, SLO attainment and thrash. Times are on the trace's clock."""

    rule: str
    began_with: Mapping[str, int] = field(default_factory=dict)  # replicas, by role
    looks: list[ScaleLook] = field(default_factory=list)
    requests: int = 0
    answered: int = 0
    in_slo: int = 0
    replica_s: dict[str, float] = field(default_factory=dict)  # by role, starting and draining included
    starts: int = 0  # replicas ordered after the first ones
    reversals: int = 0  # a change against the direction of the one before
    most: int = 0
    ttft_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    _direction: dict[str, int] = field(default_factory=dict)

    @property
    def attainment(self) -> float:
        return self.in_slo / self.requests if self.requests else 1.0

    @property
    def replica_hours(self) -> float:
        return sum(self.replica_s.values()) / 3600

    def note_change(self, role: str, more: int) -> None:
        """`more`: replicas added; negative: removed."""
        if not more:
            return
        self.starts += max(0, more)
        direction = 1 if more > 0 else -1
        self.reversals += self._direction.get(role, direction) != direction
        self._direction[role] = direction


_END_S = 24 * 3600.0  # after the last arrival: whatever is unanswered then will never be


class RequestJudge:
    """Which requests kept the SLO, for the run's totals and for what a rule is told. There is one for each role,
    which is judged by its own bounds of the SLO; the whole request is judged by all of them."""

    def __init__(self, slo: Slo, role: str, run: ScaledRun) -> None:
        self._slo, self._role, self._run = slo, role, run
        self._own = slo.of_role(role)
        self._whole: dict[int, Arrival] = {}  # by what a replica was given: the request it is part of
        self._ended = self._kept = 0
        self._outputs = self._output_tokens = 0

    def begin(self, arrival: Arrival) -> Arrival:
        """What the first role is given of a request: prefill draws one token."""
        if self._role != "prefill":
            return arrival
        part = replace(arrival, output_tokens=1)
        self.expect(part, arrival)
        return part

    def expect(self, part: Arrival, whole: Arrival) -> None:
        self._whole[id(part)] = whole

    def note(self, over: Iterable[Served]) -> Iterator[tuple[Arrival, float]]:
        """Judges; yields requests that decode has to go on with, and when their first token was drawn."""
        for one in over:
            arrival = self._whole.pop(id(one.arrival), one.arrival)
            times = one.times(arrival)
            if times is None or one.first_token_s is None:
                continue
            self._ended += 1
            self._outputs += 1
            self._output_tokens += arrival.output_tokens
            self._kept += self._own is None or self._own.missed(times) is None
            if self._role == "prefill" and arrival.output_tokens > 1:
                yield arrival, one.first_token_s
                continue
            self._run.answered += 1
            self._run.in_slo += self._slo.missed(times) is None
            self._run.ttft_s.append(one.first_token_s - arrival.arrived_s)

    def since_look(self) -> tuple[int, int]:
        """Requests of this role that ended, and those within its part of the SLO."""
        found = self._ended, self._kept
        self._ended = self._kept = 0
        return found

    @property
    def mean_output_tokens(self) -> float:
        return self._output_tokens / self._outputs if self._outputs else 0.0


@dataclass(slots=True)
class _Member:
    """One replica of the fleet, from its order until it is gone. It is played by the engine's own loop."""

    name: str
    ordered_s: float
    ready_s: float
    engine: SimulatedEngine
    draining: bool = False
    busy_s: float = 0.0  # as of the look before
    open: list[Served] = field(default_factory=list)  # requests that had not ended when it was last asked
    _taken: int = 0
    _turns: int = -1

    def state(self, now_s: float) -> Literal["starting", "ready", "draining"]:
        if self.draining:
            return "draining"
        return "starting" if now_s < self.ready_s else "ready"

    @property
    def requests(self) -> int:
        """The number of requests that it was given and has not answered."""
        return len(self.engine.scheduler.requests) + len(self.engine.waiting_arrivals())

    def over(self) -> list[Served]:
        """Requests that ended since the last time; none where its loop has not turned."""
        if self._turns == self.engine.turns:
            return []
        self._turns = self.engine.turns
        served = self.engine.run.served
        known, self._taken = [*self.open, *served[self._taken :]], len(served)
        over = [one for one in known if one.finished or one.refused is not None]
        self.open = [one for one in known if not (one.finished or one.refused is not None)]
        return over

    def waiting(self) -> tuple[int, int]:
        """Requests without a first token, and the tokens of their prompts that are not computed."""
        coming = self.engine.waiting_arrivals()
        tokens = sum(one.prompt_tokens for one in coming if one.first_token_s is None) + sum(
            max(0, request.prompt_length - request.sequences[0].computed)
            for request in self.engine.scheduler.requests.values()
        )
        return sum(one.first_token_s is None for one in self.open) + len(coming), tokens


@dataclass(slots=True)
class _Role:
    name: str
    router: Router
    members: dict[str, _Member] = field(default_factory=dict)
    held: deque[Arrival] = field(default_factory=deque)  # came while no replica was ready
    arrived: int = 0  # since the look before
    arrived_tokens: int = 0

    def ready(self, now_s: float) -> list[_Member]:
        return [one for one in self.members.values() if one.state(now_s) == "ready"]


class AutoscaledFleet:
    def __init__(
        self,
        make_replica: Callable[[str], SimulatedEngine],
        make_router: Callable[[], Router],
        rule: ScalingRule,
        slo: Slo,
        start_up_s: float,
        *,
        begin_with: Mapping[str, int] | int = 1,
        name: str = "",
        transfer_s: Callable[[int], float] = lambda tokens: 0.0,
        block_size: int = 16,
    ) -> None:
        """`make_replica` is told its role; `begin_with`: replicas by role, or of the role `both`; `transfer_s`: of
        a prompt's keys and values, from prefill to decode."""
        self._make_replica, self._rule, self._start_up_s = make_replica, rule, start_up_s
        self._transfer_s, self._itl_bound_s = transfer_s, slo.itl_s
        counts = {"both": begin_with} if isinstance(begin_with, int) else begin_with
        self.run = ScaledRun(name, counts)
        self._roles = {role: _Role(role, make_router()) for role in counts}
        self._judges = {role: RequestJudge(slo, role, self.run) for role in counts}
        self._numbers = itertools.count()
        self._readies: list[tuple[float, str, str]] = []
        self._landings: list[tuple[float, int, Arrival]] = []  # on their way from prefill to decode
        self._block_size = block_size
        for role in self._roles.values():
            for _ in range(counts[role.name]):
                self._order(role, 0.0, ready_s=0.0)

    def serve(self, arrivals: Sequence[Arrival]) -> ScaledRun:
        """All arrivals, given in order of time, until the last is answered."""
        look_s = self._rule.interval_s
        coming = 0
        stop_s = arrivals[-1].arrived_s + _END_S
        while coming < len(arrivals) or (self._open() and look_s < stop_s):
            next_s = arrivals[coming].arrived_s if coming < len(arrivals) else float("inf")
            ready_s = self._readies[0][0] if self._readies else float("inf")
            now_s = min(next_s, ready_s, look_s)
            if self._land_one(now_s):
                continue
            if now_s == ready_s:
                _, _, role = heapq.heappop(self._readies)
                self._place_held(self._roles[role], now_s)
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
        for role in self._roles.values():  # decode will have it soon, too
            role.arrived += 1
            role.arrived_tokens += arrival.prompt_tokens
        first = next(iter(self._roles.values()))
        self._hold(first, self._judges[first.name].begin(arrival), now_s)

    def _hold(self, role: _Role, arrival: Arrival, now_s: float) -> None:
        role.held.append(arrival)
        self._place_held(role, now_s)

    def _place_held(self, role: _Role, now_s: float) -> None:
        ready = role.ready(now_s)
        if not ready or not role.held:
            return
        for one in ready:
            one.engine.advance(now_s)
            one.engine.clock_s = max(one.engine.clock_s, one.ready_s)
        prompt_s = min(one.engine.scheduler.costs.prompt_s_per_token for one in ready)
        while role.held:
            arrival = role.held.popleft()
            ask = Ask(arrival.prompt_tokens, prefix_hashes(arrival, self._block_size))
            route = role.router.route(ask, [replica_view(one.name, one.engine, prompt_s) for one in ready])
            role.members[route.replica].engine.give(arrival, route.cached_tokens)

    def _land_one(self, now_s: float) -> bool:
        """One prompt whose first token was drawn goes to a decode replica; False: none has arrived by now."""
        prefill = self._roles.get("prefill")
        if prefill is None:
            return False
        for one in prefill.members.values():
            one.engine.advance(now_s)
            self._note_over(prefill, one)
        if not self._landings or self._landings[0][0] > now_s:
            return False
        landed_s, _, arrival = heapq.heappop(self._landings)
        self._hold(self._roles["decode"], arrival, landed_s)
        return True

    def _note_over(self, role: _Role, member: _Member) -> None:
        """What ended there is judged, and what was prefilled goes on."""
        for arrival, first_s in self._judges[role.name].note(member.over()):
            landed_s = first_s + self._transfer_s(arrival.prompt_tokens)
            moved = replace(arrival, arrived_s=landed_s, first_token_s=first_s, shared=())
            self._judges["decode"].expect(moved, arrival)
            heapq.heappush(self._landings, (landed_s, next(self._numbers), moved))

    def _open(self) -> bool:
        return bool(self._landings) or any(
            role.held or any(one.requests for one in role.members.values()) for role in self._roles.values()
        )

    # -- replicas -----------------------------------------------------------------------------------------
    def _order(self, role: _Role, now_s: float, ready_s: float) -> None:
        name = f"{role.name}{next(self._numbers)}"
        role.members[name] = member = _Member(name, now_s, ready_s, self._make_replica(role.name))
        member.engine.run.itl_bound_s = self._itl_bound_s
        heapq.heappush(self._readies, (ready_s, name, role.name))

    def _look(self, now_s: float) -> None:
        seen = {name: self._seen(role, now_s) for name, role in self._roles.items()}
        for target in self._rule.decide(FleetSeen(now_s, seen)):
            self._obey(self._roles[target.role], target, seen[target.role], now_s)
        self.run.most = max(self.run.most, sum(len(role.members) for role in self._roles.values()))

    def _obey(self, role: _Role, target: ScaleTo, seen: RoleSeen, now_s: float) -> None:
        self._drop_drained(role, now_s)
        lives = [
            ReplicaLife(one.name, one.state(now_s), one.requests, one.ordered_s)
            for one in role.members.values()
        ]
        todo = changes(lives, target.replicas)
        for _ in range(todo.start):
            self._order(role, now_s, now_s + self._start_up_s)
        for name in todo.take_back:
            role.members[name].draining = False
        for name in todo.drain:
            role.members[name].draining = True
        for name in todo.cancel:
            self._remove(role, role.members[name], now_s)
        self._drop_drained(role, now_s)
        self._place_held(role, now_s)
        added, removed = todo.start + len(todo.take_back), len(todo.drain) + len(todo.cancel)
        self.run.note_change(role.name, added - removed)
        self.run.looks.append(
            ScaleLook(
                now_s, role.name, seen.ready, seen.starting, target.replicas, seen.arrived, seen.waiting,
                seen.ended, seen.ended_in_slo, target.why,
            )
        )  # fmt: skip

    def _drop_drained(self, role: _Role, now_s: float) -> None:
        for one in [one for one in role.members.values() if one.draining and not one.requests]:
            # It was empty when its last request ended, which may be a while ago.
            empty_s = max(one.engine.clock_s, one.ready_s, now_s - self._rule.interval_s)
            self._remove(role, one, min(now_s, empty_s))

    def _remove(self, role: _Role, member: _Member, now_s: float) -> None:
        self._note_over(role, member)
        del role.members[member.name]
        self._readies = [one for one in self._readies if one[1] != member.name]
        heapq.heapify(self._readies)
        role.router.forget(member.name)
        spent_s = self.run.replica_s.get(role.name, 0.0)
        self.run.replica_s[role.name] = spent_s + max(0.0, now_s - member.ordered_s)

    def _end(self, now_s: float) -> ScaledRun:
        for role in self._roles.values():
            for one in list(role.members.values()):
                self._remove(role, one, now_s)
        self.run.ended_s = now_s
        return self.run

    # -- what the rule sees -------------------------------------------------------------------------------
    def _seen(self, role: _Role, now_s: float) -> RoleSeen:
        waiting = running = tokens = ready = starting = 0
        busy_s = 0.0
        for one in role.members.values():
            one.engine.advance(now_s)
            self._note_over(role, one)
            queued, queued_tokens = one.waiting()
            waiting, tokens = waiting + queued, tokens + queued_tokens
            running += sum(served.first_token_s is not None for served in one.open)
            state, spent_s = one.state(now_s), one.engine.run.device_busy_s
            starting += state == "starting"
            if state == "ready":
                ready += 1
                busy_s += spent_s - one.busy_s
            one.busy_s = spent_s
        judge = self._judges[role.name]
        ended, kept = judge.since_look()
        seen = RoleSeen(
            ready=ready,
            starting=starting,
            arrived=role.arrived,
            arrived_prompt_tokens=role.arrived_tokens,
            waiting=waiting + len(role.held),
            waiting_prompt_tokens=tokens + sum(one.prompt_tokens for one in role.held),
            running=running,
            mean_output_tokens=judge.mean_output_tokens,
            busy=min(1.0, busy_s / (max(1, ready) * self._rule.interval_s)),
            ended=ended,
            ended_in_slo=kept,
        )
        role.arrived = role.arrived_tokens = 0
        return seen
