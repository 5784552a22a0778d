"""ScalingLimits: the fewest and the most replicas, and what they may cost. Every rule applies it to its answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cumulo.cluster.decide.autoscale.seen import ScaleTo
from cumulo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScalingLimits:
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
