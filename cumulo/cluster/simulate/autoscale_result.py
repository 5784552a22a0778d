"""What an autoscaling rule made of a trace: cost, SLO attainment, thrash, and the course of both. Filled by the
simulated fleet and read by the report.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ScaleLook:
    """One look of the rule, for the picture."""

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
    """Times are on the trace's clock."""

    rule: str
    looks: list[ScaleLook] = field(default_factory=list)
    requests: int = 0
    answered: int = 0
    in_slo: int = 0
    replica_s: dict[str, float] = field(default_factory=dict)  # by role, starting and draining included
    starts: int = 0  # replicas ordered after the first ones
    stops: int = 0
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
        self.stops += max(0, -more)
        direction = 1 if more > 0 else -1
        self.reversals += self._direction.get(role, direction) != direction
        self._direction[role] = direction
