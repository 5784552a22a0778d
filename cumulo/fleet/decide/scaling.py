"""What an autoscaling rule sees of a fleet, what it answers, within which limits, and which replicas then start or
go. Filled by the simulator, by `cumulo serve --autoscale` and by the Ray driver; a rule reads nothing else, so it
decides alike in all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from cumulo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RoleSeen:
    """One role's replicas (`both`, `prefill` or `decode`) at a moment, and what came since the look before."""

    ready: int
    starting: int = 0  # ordered, and not serving yet
    arrived: int = 0  # requests since the look before
    arrived_prompt_tokens: int = 0
    waiting: int = 0  # requests without a first token now, those that no replica has taken included
    waiting_prompt_tokens: int = 0  # not computed yet
    running: int = 0  # requests that have a first token
    mean_output_tokens: float = 0.0  # of answers that ended so far; 0: none has
    busy: float = 0.0  # share of the time since the look before in which a ready replica had work, 0 to 1
    ended: int = 0  # requests since the look before
    ended_in_slo: int = 0

    @property
    def replicas(self) -> int:
        return self.ready + self.starting

    @property
    def requests(self) -> int:
        return self.waiting + self.running


@dataclass(frozen=True, slots=True)
class FleetSeen:
    now_s: float
    roles: Mapping[str, RoleSeen]


@dataclass(frozen=True, slots=True)
class ScaleTo:
    """How many replicas a role should have, starting ones included."""

    role: str
    replicas: int
    why: str


class ScalingRule(Protocol):
    @property
    def interval_s(self) -> float:
        """How often it wants to look."""
        ...

    def decide(self, seen: FleetSeen) -> list[ScaleTo]:
        """Returns one answer for each role. Looks come in order of time."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """What one replica serves within the SLO when prompts and answers come mixed: the work of a request, in seconds
    of a replica, is its prompt over `prompt_tok_s` plus its answer over `output_tok_s`."""

    prompt_tok_s: float
    output_tok_s: float
    # How many times as much it does when it is saturated, and requests wait. Replicas together need less slack than
    # each alone.
    saturated: float = 1.0
    decode_saturated: float | None = None  # the same of a replica that only decodes; None: as the others

    def at_most(self, role: str) -> float:
        """The factor by which a saturated replica of this role does more."""
        return self.decode_saturated or self.saturated if role == "decode" else self.saturated

    def work_s(self, role: str, prompt_tokens: float, output_tokens: float) -> float:
        prompt_s = 0.0 if role == "decode" else prompt_tokens / self.prompt_tok_s
        output_s = 0.0 if role == "prefill" else output_tokens / self.output_tok_s
        return prompt_s + output_s

    def needed(self, load: float, role: str = "both") -> float:
        """Replicas for a load, in seconds of a saturated replica per second: the load, and slack that grows with
        its root (Halfin and Whitt 1981), so that one replica alone serves what it does within the SLO."""
        alone = 1.0 / self.at_most(role)
        return load + (1.0 - alone) * math.sqrt(load / alone)


@dataclass(frozen=True, slots=True)
class ReplicaLife:
    name: str
    state: Literal["starting", "ready", "draining"]
    requests: int = 0
    since_s: float = 0.0  # when it was ordered


@dataclass(frozen=True, slots=True)
class ScaleChanges:
    start: int = 0  # new replicas
    take_back: tuple[str, ...] = ()  # that drain
    cancel: tuple[str, ...] = ()  # that have not begun to serve
    drain: tuple[str, ...] = ()


def changes(replicas: Sequence[ReplicaLife], wanted: int) -> ScaleChanges:
    """Which replicas start and which go, so that a role has as many as its rule wants. A replica never goes with
    requests on it: it drains first. One that drains is taken back before a new one starts. Cheapest first: up by
    taking back, then by starting; down by cancelling the youngest, then by draining the replica with the fewest
    requests."""
    ready = [one for one in replicas if one.state == "ready"]
    starting = [one for one in replicas if one.state == "starting"]
    missing = wanted - len(ready) - len(starting)
    if missing >= 0:
        draining = sorted(
            (one for one in replicas if one.state == "draining"), key=lambda one: (-one.requests, one.since_s)
        )
        back = tuple(one.name for one in draining[:missing])
        return ScaleChanges(start=missing - len(back), take_back=back)
    cancel = sorted(starting, key=lambda one: -one.since_s)[:-missing]
    goes = sorted(ready, key=lambda one: (one.requests, -one.since_s))[: -missing - len(cancel)]
    return ScaleChanges(cancel=tuple(one.name for one in cancel), drain=tuple(one.name for one in goes))


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """The fewest and the most replicas, and what they may cost. Every rule applies it to its answer."""

    fewest: int = 1  # of each role; 0: the role may scale to zero
    most: int = 8  # of each role
    most_devices: int | None = None  # of all roles together
    budget_per_hour: float | None = None  # of all roles together, in the currency of the device's price
    devices_per_replica: Mapping[str, int] = field(default_factory=dict)  # by role; 1 where it is not named
    price_per_device_hour: float = 0.0

    def __post_init__(self) -> None:
        if self.fewest < 0 or self.most < max(1, self.fewest):
            raise ConfigError(
                f"autoscaling needs 0 <= min <= max and max of 1 or more, got min {self.fewest}, max {self.most}"
            )
        if self.budget_per_hour is not None and self.price_per_device_hour <= 0:
            raise ConfigError("a budget per hour needs a device with a price; give most_devices instead")

    @property
    def device_cap(self) -> float:
        caps = [float("inf")]
        if self.most_devices is not None:
            caps.append(float(self.most_devices))
        if self.budget_per_hour is not None:
            caps.append(self.budget_per_hour / self.price_per_device_hour)
        return min(caps)

    def devices_of(self, role: str) -> int:
        return self.devices_per_replica.get(role, 1)

    def apply(self, wanted: Sequence[ScaleTo]) -> list[ScaleTo]:
        """The answers within the limits. Where the devices do not suffice for all roles, the role that would keep
        the largest share of what it wants gives one replica up, again and again."""
        clamped = [self._clamped(one) for one in wanted]
        counts = {one.role: one.replicas for one in clamped}
        cap = self.device_cap
        while sum(count * self.devices_of(role) for role, count in counts.items()) > cap:
            above = [one for one in clamped if counts[one.role] > self.fewest]
            if not above:
                break
            fattest = max(above, key=lambda one: (counts[one.role] / one.replicas, counts[one.role]))
            counts[fattest.role] -= 1
        return [
            one
            if counts[one.role] == one.replicas
            else replace(
                one,
                replicas=counts[one.role],
                why=f"{one.why}; the budget of {cap:g} devices allows {counts[one.role]}",
            )
            for one in clamped
        ]

    def _clamped(self, one: ScaleTo) -> ScaleTo:
        if one.replicas < self.fewest:
            return replace(one, replicas=self.fewest, why=f"{one.why}; min is {self.fewest}")
        if one.replicas > self.most:
            return replace(one, replicas=self.most, why=f"{one.why}; max is {self.most}")
        return one
