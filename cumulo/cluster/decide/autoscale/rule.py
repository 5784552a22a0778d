"""ForecastRule: Cumulo's own autoscaling rule. Load expected when a replica ordered now would be ready, over what a
replica serves within the SLO; corrected by how many requests kept the SLO; and the queue, where new replicas would
still help it.

    rule = ForecastRule(ReplicaSpeed(9000, 700), start_up_s=60, slo=Slo(ttft_s=1, itl_s=0.05))
    rule.decide(seen)  # [ScaleTo("both", 3, "load 2.1 in 60 s (margin 0.3) ...")]
"""

import math
from collections import deque
from dataclasses import dataclass, field

from cumulo.cluster.decide.autoscale.forecast import LoadForecast
from cumulo.cluster.decide.autoscale.limits import ScalingLimits
from cumulo.cluster.decide.autoscale.seen import FleetSeen, ReplicaSpeed, RoleSeen, ScaleTo
from cumulo.spec.slo import Slo

_USUAL_OUTPUT_TOKENS = 128.0  # of an answer, before any has ended
_HEADROOM = (0.6, 3.0)  # bounds of what is learnt from the SLO
_LESS, _MORE = 0.01, 0.10  # steps in which it is learnt
_ENDED = 30  # requests that an attainment is judged from, at least


@dataclass(slots=True)
class _RoleMemory:
    forecast: LoadForecast
    headroom: float
    wanted: deque[tuple[float, int]] = field(default_factory=deque)
    busy_s: float | None = None  # when there was a request last
    ended: int = 0
    in_slo: int = 0


@dataclass(slots=True)
class ForecastRule:
    speed: ReplicaSpeed
    start_up_s: float
    slo: Slo
    limits: ScalingLimits = field(default_factory=ScalingLimits)
    interval_s: float = 10.0
    cooldown_s: float | None = (
        None  # the fewest seconds before a replica is removed; None: twice its start-up
    )
    idle_s: float = 300.0  # without a request, before the last replica of a role goes
    headroom: float = 1.1  # to begin with: replicas for each replica of load
    quantile: float = 0.95  # of forecasts that the margin covers
    _roles: dict[str, _RoleMemory] = field(default_factory=dict)

    def decide(self, seen: FleetSeen) -> list[ScaleTo]:
        return self.limits.apply(
            [self._decide_role(role, one, seen.now_s) for role, one in seen.roles.items()]
        )

    def _decide_role(self, role: str, seen: RoleSeen, now_s: float) -> ScaleTo:
        memory = self._roles.setdefault(
            role, _RoleMemory(LoadForecast(self.start_up_s + self.interval_s, self.interval_s), self.headroom)
        )
        output = seen.mean_output_tokens or _USUAL_OUTPUT_TOKENS
        work_s = self.speed.work_s(role, seen.arrived_prompt_tokens, output * seen.arrived)
        memory.forecast.note(now_s, work_s)
        self._learn(memory, seen)
        if seen.requests or seen.arrived:
            memory.busy_s = now_s
        if not self._may_sleep(memory, seen, now_s):
            return self._awake(role, memory, seen, now_s, output)
        return ScaleTo(role, 0, f"no request for {now_s - (memory.busy_s or now_s):.0f} s")

    def _awake(self, role: str, memory: _RoleMemory, seen: RoleSeen, now_s: float, output: float) -> ScaleTo:
        one_s = self.speed.work_s(role, seen.arrived_prompt_tokens / max(1, seen.arrived), output)
        predicted, margin = memory.forecast.predicted(now_s), memory.forecast.margin(self.quantile, one_s)
        load = memory.headroom * (predicted + margin)
        queued = self._for_queue(role, seen)
        wanted = max(1, math.ceil(load + queued - 0.05))
        why = f"load {predicted:.2f} replicas expected in {memory.forecast.horizon_s:.0f} s, margin {margin:.2f}"
        why += f", headroom {memory.headroom:.2f}"
        if queued:
            why += f", {queued:.2f} for {seen.waiting} waiting requests"
        return ScaleTo(role, self._cooled(memory, wanted, seen.replicas, now_s), why)

    def _may_sleep(self, memory: _RoleMemory, seen: RoleSeen, now_s: float) -> bool:
        if self.limits.fewest > 0 or seen.requests or seen.arrived:
            return False
        return seen.replicas == 0 or now_s - (memory.busy_s or 0.0) >= self.idle_s

    def _for_queue(self, role: str, seen: RoleSeen) -> float:
        """Replicas to clear the queue: none where it is gone before they could have started."""
        waiting_s = self.speed.work_s(role, seen.waiting_prompt_tokens, 0.0)
        if role == "decode":
            waiting_s = 0.0
        left_s = waiting_s - max(1, seen.ready) * self.start_up_s
        return max(0.0, left_s) / (self.start_up_s + self.interval_s)

    def _cooled(self, memory: _RoleMemory, wanted: int, now: int, now_s: float) -> int:
        """Up at once; down to the most that was wanted within the cool-down."""
        cooldown_s = 2 * self.start_up_s if self.cooldown_s is None else self.cooldown_s
        memory.wanted.append((now_s, wanted))
        while memory.wanted[0][0] < now_s - cooldown_s:
            memory.wanted.popleft()
        return wanted if wanted >= now else min(now, max(count for _, count in memory.wanted))

    def _learn(self, memory: _RoleMemory, seen: RoleSeen) -> None:
        """Too few requests within the SLO: more headroom, at once. Enough: a little less."""
        memory.ended += seen.ended
        memory.in_slo += seen.ended_in_slo
        if memory.ended < _ENDED:
            return
        kept = memory.in_slo / memory.ended
        memory.ended = memory.in_slo = 0
        # In balance, as many small steps down as a share of misses undoes.
        missed_more = (1 - kept) - (1 - self.slo.share)
        step = (
            _MORE * missed_more / self.slo.share
            if missed_more > 0
            else _LESS * missed_more / (1 - self.slo.share)
        )
        low, high = _HEADROOM
        memory.headroom = min(high, max(low, memory.headroom * (1 + step)))
