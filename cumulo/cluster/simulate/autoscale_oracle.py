"""OracleRule: an autoscaling rule that knows the trace to come. `cumulo simulate autoscale --rule oracle` shows
what foresight would save, and so what no real rule can be asked for.

It orders replicas a start-up before they are needed, and lets them go when they are not needed for a start-up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cumulo.cluster.decide.autoscale.limits import ScalingLimits
from cumulo.cluster.decide.autoscale.seen import FleetSeen, ReplicaSpeed, ScaleTo
from cumulo.engine.simulate.run import Arrival

_BIN_S = 2.0
_BINS = 3  # over which load is averaged


@dataclass(slots=True)
class OracleRule:
    speed: ReplicaSpeed
    start_up_s: float
    arrivals: Sequence[Arrival]
    limits: ScalingLimits
    headroom: float = 1.0  # replicas for each that the load needs; found with hindsight
    interval_s: float = 5.0
    _needs: dict[str, list[float]] = field(default_factory=dict)

    def decide(self, seen: FleetSeen) -> list[ScaleTo]:
        wanted = []
        for role in seen.roles:
            if role not in self._needs:
                self._needs[role] = needs(self.speed, role, self.arrivals)
            first = max(0, int(seen.now_s / _BIN_S) - 1)
            last = int((seen.now_s + self.start_up_s + self.interval_s) / _BIN_S) + 1
            need = max(self._needs[role][first : last + 1], default=0.0)
            count = max(1, math.ceil(self.headroom * need - 0.05))
            wanted.append(ScaleTo(role, count, f"{need:.2f} replicas will be needed within the start-up"))
        return self.limits.apply(wanted)


def needs(speed: ReplicaSpeed, role: str, arrivals: Sequence[Arrival]) -> list[float]:
    """Replicas that each two seconds of the trace need, averaged with those before."""
    work_s = [0.0] * (int(arrivals[-1].arrived_s / _BIN_S) + 1)
    for one in arrivals:
        work = speed.work_s(role, one.prompt_tokens, one.output_tokens) / speed.at_most(role)
        work_s[int(one.arrived_s / _BIN_S)] += work
    found = []
    for at in range(len(work_s)):
        around = work_s[max(0, at - _BINS + 1) : at + 1]
        found.append(speed.needed(sum(around) / (len(around) * _BIN_S), role))
    return found
