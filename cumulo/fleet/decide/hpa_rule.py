"""The rules that Kubernetes offers, to rehearse next to ours: HPA's formula on a metric per replica, alone and with
KEDA's scaling from and to zero.

HPA (kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale): every 15 s, replicas = ceil(total/target);
no change within 10% of the target; at most double, or 4 more, in a period; the largest answer of the last
`stabilization_s` decides about scaling down. KEDA (keda.sh/docs) looks every 30 s while there are no replicas, and
removes the last one `cooldown_s` after the metric was last above zero.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cumulo.errors import ConfigError
from cumulo.fleet.decide.scaling import FleetSeen, RoleSeen, ScaleTo, ScalingLimits

# Summed over ready replicas: requests that wait for their first token; that wait or run; the share of the time in
# which a replica computes.
METRICS: Mapping[str, Callable[[RoleSeen], float]] = {
    "queue": lambda seen: seen.waiting,
    "concurrency": lambda seen: seen.requests,
    "utilization": lambda seen: seen.busy * seen.ready,
}
_TOLERANCE = 0.1
_MOST_MORE, _MOST_TIMES = 4, 2  # of replicas in one period


@dataclass(slots=True)
class HpaRule:
    metric: str
    target: float  # of the metric, per replica
    limits: ScalingLimits = field(default_factory=ScalingLimits)
    stabilization_s: float = 300.0
    interval_s: float = 15.0
    keda: bool = False  # may scale to zero, where the limits allow it
    activation_s: float = 30.0  # how often KEDA looks while there are no replicas
    cooldown_s: float = 300.0
    _answers: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)
    _active_s: dict[str, float] = field(default_factory=dict)  # when there was work last

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(
                f"there is no metric {self.metric!r} to scale on; use one of {', '.join(METRICS)}"
            )
        if not self.target > 0:
            raise ConfigError(f"the target of {self.metric} must be more than 0, got {self.target:g}")

    def decide(self, seen: FleetSeen) -> list[ScaleTo]:
        return self.limits.apply(
            [self._decide_role(role, one, seen.now_s) for role, one in seen.roles.items()]
        )

    def _decide_role(self, role: str, seen: RoleSeen, now_s: float) -> ScaleTo:
        total = METRICS[self.metric](seen)
        if seen.requests or seen.arrived:
            self._active_s[role] = now_s
        if seen.replicas == 0:
            return self._from_zero(role, seen, now_s)
        now = seen.replicas
        wanted = self._formula(total, seen)
        wanted = min(wanted, max(_MOST_TIMES * now, now + _MOST_MORE))
        answers = self._answers.setdefault(role, deque())
        answers.append((now_s, wanted))
        while answers[0][0] < now_s - self.stabilization_s:
            answers.popleft()
        if wanted < now:
            wanted = min(now, max(count for _, count in answers))
        why = f"{self.metric} is {total:.4g}, {self.target:g} per replica"
        if wanted <= 1 and self.keda and self.limits.fewest == 0:
            idle_s = now_s - self._active_s.setdefault(role, now_s)
            if idle_s >= self.cooldown_s:
                return ScaleTo(role, 0, f"no request for {idle_s:.0f} s")
        return ScaleTo(role, max(1, wanted), why)

    def _formula(self, total: float, seen: RoleSeen) -> int:
        """Replicas that start count as if they had no load, as HPA does when it scales up."""
        now = seen.replicas
        ratio = total / (self.target * max(1, now))
        if abs(ratio - 1) <= _TOLERANCE:
            return now
        return math.ceil(total / self.target - 1e-9)

    def _from_zero(self, role: str, seen: RoleSeen, now_s: float) -> ScaleTo:
        looked = int(now_s / self.activation_s) != int((now_s - self.interval_s) / self.activation_s)
        if seen.requests and (looked or not self.keda):
            return ScaleTo(role, 1, f"{seen.requests} requests wait and there is no replica")
        return ScaleTo(role, 0, "no request")
