"""ForecastRule: Cumulo's own autoscaling rule. It follows the load that is expected when a replica ordered now
would be ready, in the way that would have been cheapest in the role's own past; keeps replicas ready for bursts
that are shorter than a start-up, as many as that past needed; corrects itself by how many requests kept the SLO;
and adds replicas for a queue where they would still help it.

    rule = ForecastRule(ReplicaSpeed(9000, 700, saturated=1.5), start_up_s=60, slo=Slo(ttft_s=1, itl_s=0.05))
    rule.decide(seen)  # [ScaleTo("both", 3, "load 2.1 expected in 65 s ...")]
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from cumulo.fleet.decide.scaling import FleetSeen, ReplicaSpeed, RoleSeen, ScaleTo, ScalingLimits
from cumulo.spec.slo import Slo

_AROUND = 2  # looks before one, that count with it


class Following(NamedTuple):
    """How a fleet follows its load."""

    window_s: float  # over which load is averaged
    hold_s: float  # replicas stay so long after they were last wanted
    floor: int = 0  # replicas that stand ready whatever the load


class LookBack(NamedTuple):
    """What came between two looks of the past."""

    work_s: float  # of a saturated replica, that came since the look before
    requests: int


@dataclass(slots=True)
class BurstMemory:
    """How many replicas should stand ready for bursts, and how eagerly load should be followed, rehearsed on the
    role's own past.

    A burst that is over before a new replica has started must be served by replicas that are there. The memory
    keeps the work of each look, and plays it as a fluid through fleets that follow the load in different ways with
    different floors: capacity that was ordered serves after the start-up, work that is not served waits, and
    requests that wait longer than the SLO allows are late. The cheapest way that would have kept the SLO is the one
    to follow next.
    """

    interval_s: float
    start_up_s: float
    memory_s: float = 7200.0
    looks: deque[LookBack] = field(default_factory=deque)

    def note(self, work_s: float, requests: int) -> None:
        self.looks.append(LookBack(work_s, requests))
        while len(self.looks) * self.interval_s > self.memory_s:
            self.looks.popleft()

    @property
    def span_s(self) -> float:
        return len(self.looks) * self.interval_s

    def best(
        self,
        ways: Sequence[Following],
        needed: Callable[[float], float],
        share: float,
        slack_s: float,
        most: int,
        slows: bool = True,
    ) -> Following:
        """The cheapest of these ways, each with the lowest floor that keeps `share` of the requests within
        `slack_s` of waiting; where none does, the one that keeps most. `needed`: replicas for a load. `slows`:
        whether requests that run together slow each other down, so that they may be late without a wait."""
        works_s = self._needs(needed) if slows else [0.0] * len(self.looks)

        def with_floor(way: Following) -> tuple[Following, float, float]:
            """With its lowest floor; what it keeps; replicas it takes on average."""
            follows = self._follows(way, needed, most)

            def kept(floor: int) -> float:
                return self._kept(follows, works_s, floor, slack_s)

            floor = bisect_left(range(most), True, key=lambda floor: kept(floor) >= share)
            counts = [max(floor, 1, one) for one in follows]
            return way._replace(floor=floor), kept(floor), sum(counts) / max(1, len(counts))

        found = [with_floor(way) for way in ways]
        good = [one for one in found if one[1] >= share]
        if good:
            return min(good, key=lambda one: one[2])[0]
        return max(found, key=lambda one: one[1])[0]

    def _needs(self, needed: Callable[[float], float]) -> list[float]:
        """Replicas for what came around each look: with fewer, answers come too slowly, though none waits."""
        works = [look.work_s for look in self.looks]
        return [
            needed(sum(works[max(0, at - _AROUND) : at + 1]) / (min(at, _AROUND) + 1) / self.interval_s)
            for at in range(len(works))
        ]

    def _follows(self, way: Following, needed: Callable[[float], float], most: int) -> list[int]:
        """Replicas that would have been ready at each look, without a floor."""
        window = max(1, round(way.window_s / self.interval_s))
        hold, late = round(way.hold_s / self.interval_s), math.ceil(self.start_up_s / self.interval_s)
        ordered: list[int] = []
        total = 0.0
        highest: deque[tuple[int, int]] = deque()  # of the last `hold` looks, falling
        for at, look in enumerate(self.looks):
            total += look.work_s - (self.looks[at - window].work_s if at >= window else 0.0)
            wanted = min(
                most, math.ceil(needed(max(0.0, total) / (min(at + 1, window) * self.interval_s)) - 0.05)
            )
            while highest and highest[-1][1] <= wanted:
                highest.pop()
            highest.append((at, wanted))
            while highest[0][0] < at - hold:
                highest.popleft()
            ordered.append(highest[0][1])
        # Up after the start-up, down at once: a replica serves where it was wanted all the time since its order.
        return [min(ordered[max(0, at - late) : at + 1]) for at in range(len(ordered))]

    def _kept(self, follows: Sequence[int], least: Sequence[float], floor: int, slack_s: float) -> float:
        backlog_s = late = total = 0.0
        for look, ready, enough in zip(self.looks, follows, least, strict=True):
            count = max(floor, ready, 1)
            before_s = backlog_s / count
            backlog_s = max(0.0, backlog_s + look.work_s - count * self.interval_s)
            after_s = backlog_s / count
            total += look.requests
            if enough > count:
                late += look.requests
            elif max(before_s, after_s) > slack_s:
                low, high = sorted((before_s, after_s))
                late += look.requests * (1.0 if low >= slack_s else (high - slack_s) / (high - low))
        return 1.0 - late / total if total else 1.0


_DAMPED = 0.5  # of a trend is believed


@dataclass(slots=True)
class LoadForecast:
    """A role's load in a while: the mean of the last looks plus a damped trend. Load is work that arrives, in
    replicas: seconds of a replica's time per second."""

    horizon_s: float  # how far ahead: what a new replica takes to start
    interval_s: float  # between two looks
    window_s: float = 60.0  # over which load is averaged
    trend_s: float = 300.0  # over which its trend is
    _looks: deque[tuple[float, float]] = field(default_factory=deque)  # time, work since the look before
    _first_s: float | None = None

    def note(self, now_s: float, work_s: float) -> None:
        """Work that came since the look before."""
        if self._first_s is None:
            self._first_s = now_s - self.interval_s
        self._looks.append((now_s, work_s))
        kept_s = max(self.trend_s, self.window_s)
        while self._looks[0][0] <= now_s - kept_s:
            self._looks.popleft()

    def predicted(self, now_s: float) -> float:
        assert self._first_s is not None
        level = self._mean(now_s - self.window_s, now_s)
        half_s = min(self.trend_s, now_s - self._first_s) / 2
        if half_s < self.window_s:
            return level
        slope = (self._mean(now_s - half_s, now_s) - self._mean(now_s - 2 * half_s, now_s - half_s)) / half_s
        return max(0.0, level + _DAMPED * slope * self.horizon_s)

    def lately(self, now_s: float, window_s: float) -> float:
        """Mean load of a short window, as it is in a burst."""
        return self._mean(now_s - window_s, now_s)

    def _mean(self, from_s: float, to_s: float) -> float:
        assert self._first_s is not None
        work = sum(work for time_s, work in self._looks if from_s < time_s <= to_s)
        return work / max(self.interval_s, to_s - max(from_s, self._first_s))


_BURST_S = 15.0  # over which load is averaged while requests are late
_USUAL_OUTPUT_TOKENS = 128.0  # of an answer, before any has ended
_RETHINK_S = 60.0  # between two looks at the past
_ENOUGH_PAST_S, _ENOUGH_START_UPS = 300.0, 5.0  # of it, before it is believed
_HEADROOM = (0.8, 1.5)  # bounds of what is learnt from the SLO
_LESS, _MORE = 0.01, 0.05  # steps in which it is learnt
_FORGOTTEN = 0.9  # of requests that ended, what counts after _RETHINK_S
_ENDED = 30  # requests that an attainment is judged from, at least
_WINDOWS = (1.0, 3.0)  # over which load may be averaged, in start-ups
_HOLDS = (2.0, 10.0)  # how long a replica may be kept after it was wanted, in start-ups
_SAFER = 0.6  # of the requests that may be late, those the past may have been late with


@dataclass(slots=True)
class _RoleMemory:
    forecast: LoadForecast
    past: BurstMemory
    way: Following
    headroom: float = 1.0
    wanted: deque[tuple[float, int]] = field(default_factory=deque)
    busy_s: float | None = None  # when there was a request last
    rethought_s: float | None = None
    started_s: float = -math.inf  # when a replica was starting last
    ended: float = 0.0
    in_slo: float = 0.0


@dataclass(slots=True)
class ForecastRule:
    speed: ReplicaSpeed
    start_up_s: float
    slo: Slo
    limits: ScalingLimits = field(default_factory=ScalingLimits)
    interval_s: float = 5.0
    # The fewest seconds before a replica is removed; None: two or ten start-ups, whichever was cheaper in the past.
    cooldown_s: float | None = None
    idle_s: float = 300.0  # without a request, before the last replica of a role goes
    _roles: dict[str, _RoleMemory] = field(default_factory=dict)

    def decide(self, seen: FleetSeen) -> list[ScaleTo]:
        return self.limits.apply(
            [self._decide_role(role, one, seen.now_s) for role, one in seen.roles.items()]
        )

    def remember(self, role: str, looks: Iterable[tuple[int, int, int]]) -> None:
        """What came in earlier looks: requests, their prompt tokens, their output tokens."""
        memory = self._memory(role)
        for requests, prompt_tokens, output_tokens in looks:
            memory.past.note(self._work_s(role, prompt_tokens, output_tokens), requests)

    def _memory(self, role: str) -> _RoleMemory:
        if role not in self._roles:
            window_s, hold_s = 60.0, _HOLDS[0] * self.start_up_s
            self._roles[role] = _RoleMemory(
                LoadForecast(self.start_up_s + self.interval_s, self.interval_s),
                BurstMemory(self.interval_s, self.start_up_s),
                Following(window_s, hold_s if self.cooldown_s is None else self.cooldown_s),
            )
        return self._roles[role]

    def _work_s(self, role: str, prompt_tokens: float, output_tokens: float) -> float:
        """Seconds of a saturated replica."""
        return self.speed.work_s(role, prompt_tokens, output_tokens) / self.speed.at_most(role)

    def _decide_role(self, role: str, seen: RoleSeen, now_s: float) -> ScaleTo:
        memory = self._memory(role)
        output = seen.mean_output_tokens or _USUAL_OUTPUT_TOKENS
        work_s = self._work_s(role, seen.arrived_prompt_tokens, output * seen.arrived)
        memory.forecast.note(now_s, work_s)
        memory.past.note(work_s, seen.arrived)
        if seen.starting:
            memory.started_s = now_s
        # What is late because replicas start says nothing of how many there should be.
        if now_s - memory.started_s > self.start_up_s:
            memory.ended += seen.ended
            memory.in_slo += seen.ended_in_slo
        if seen.requests or seen.arrived or memory.busy_s is None:
            memory.busy_s = now_s
        self._rethink(role, memory, seen, now_s)
        if not self._may_sleep(memory, seen, now_s):
            return self._awake(role, memory, seen, now_s)
        return ScaleTo(role, 0, f"no request for {now_s - memory.busy_s:.0f} s")

    def _awake(self, role: str, memory: _RoleMemory, seen: RoleSeen, now_s: float) -> ScaleTo:
        predicted = memory.forecast.predicted(now_s)
        burst = self._is_late(role, seen)
        if burst:
            predicted = max(predicted, memory.forecast.lately(now_s, _BURST_S))
        for_load, queued = self.speed.needed(predicted, role), self._for_queue(role, seen)
        wanted = max(1, math.ceil(memory.headroom * for_load + queued - 0.05))
        floor = math.ceil(memory.headroom * memory.way.floor - 0.5)
        why = f"load {predicted:.2f} expected in {memory.forecast.horizon_s:.0f} s needs {for_load:.2f} replicas"
        if memory.headroom != 1.0:
            why += f", headroom {memory.headroom:.2f}"
        if burst:
            why += ", a burst: requests wait longer than the SLO allows"
        if floor > 1:
            why += f", {floor} stand ready for bursts"
        if queued:
            why += f", {queued:.2f} for {seen.waiting} waiting requests"
        return ScaleTo(role, max(floor, self._cooled(memory, wanted, seen.replicas, now_s)), why)

    def _may_sleep(self, memory: _RoleMemory, seen: RoleSeen, now_s: float) -> bool:
        if self.limits.fewest > 0 or seen.requests or seen.arrived:
            return False
        return seen.replicas == 0 or memory.busy_s is None or now_s - memory.busy_s >= self.idle_s

    def _for_queue(self, role: str, seen: RoleSeen) -> float:
        """Replicas to clear the queue: none where it is gone before they could have started."""
        if role == "decode":
            return 0.0
        waiting_s = self._work_s(role, seen.waiting_prompt_tokens, 0.0)
        left_s = waiting_s - max(1, seen.ready) * self.start_up_s
        return max(0.0, left_s) / (self.start_up_s + self.interval_s)

    def _is_late(self, role: str, seen: RoleSeen) -> bool:
        """Whether the queue is longer than the SLO's slack: a burst has begun, and the mean of minutes hides it."""
        if role == "decode" or not seen.waiting:
            return False
        waiting_s = self._work_s(role, seen.waiting_prompt_tokens, 0.0)
        return waiting_s > max(1, seen.ready) * self._slack_s(role, seen)

    def _cooled(self, memory: _RoleMemory, wanted: int, now: int, now_s: float) -> int:
        """Up at once; down to the most that was wanted within the cool-down."""
        memory.wanted.append((now_s, wanted))
        while memory.wanted[0][0] < now_s - memory.way.hold_s:
            memory.wanted.popleft()
        return wanted if wanted >= now else min(now, max(count for _, count in memory.wanted))

    # -- what is learnt -----------------------------------------------------------------------------------
    def _rethink(self, role: str, memory: _RoleMemory, seen: RoleSeen, now_s: float) -> None:
        """Now and then: which way of following the load would have been cheapest, and whether the SLO was kept."""
        if memory.rethought_s is not None and now_s - memory.rethought_s < _RETHINK_S:
            return
        first, memory.rethought_s = memory.rethought_s is None, now_s
        if not first:
            self._learn(memory)
        if memory.past.span_s < max(_ENOUGH_PAST_S, _ENOUGH_START_UPS * self.start_up_s):
            return
        holds = (
            [scale * self.start_up_s for scale in _HOLDS] if self.cooldown_s is None else [self.cooldown_s]
        )
        windows = sorted({max(30.0, scale * self.start_up_s) for scale in _WINDOWS})
        ways = [Following(window_s, hold_s) for window_s in windows for hold_s in holds]
        share = 1.0 - _SAFER * (1.0 - self.slo.share)
        # Prompts are computed one after another: one that does not wait is in time.
        memory.way = memory.past.best(
            ways,
            partial(self.speed.needed, role=role),
            share,
            self._slack_s(role, seen),
            self.limits.most,
            slows=role != "prefill",
        )
        memory.forecast.window_s = memory.way.window_s

    def _slack_s(self, role: str, seen: RoleSeen) -> float:
        """How long a request may wait and still keep the SLO."""
        if self.slo.ttft_s is None or role == "decode":
            return self.interval_s
        mean_tokens = seen.arrived_prompt_tokens / max(1, seen.arrived)
        return max(0.2 * self.slo.ttft_s, self.slo.ttft_s - self._work_s("prefill", mean_tokens, 0.0))

    def _learn(self, memory: _RoleMemory) -> None:
        """Too few requests within the SLO: more headroom. Enough: a little less."""
        if memory.ended < _ENDED:
            return
        missed, may_miss = 1 - memory.in_slo / memory.ended, 1 - self.slo.share
        step = (
            min(_MORE, _MORE * (missed / may_miss - 1))
            if missed > may_miss
            else -_LESS * (1 - missed / may_miss)
        )
        low, high = _HEADROOM
        memory.headroom = min(high, max(low, memory.headroom * (1 + step)))
        memory.ended *= _FORGOTTEN
        memory.in_slo *= _FORGOTTEN
