"""Days, energy and money of a whole training run, from a step's estimate. Reports and limits use it."""

from dataclasses import dataclass, replace

from cumulo.errors import ConfigError
from cumulo.plan.search import Plan, search
from cumulo.plan.search_space import TrainGoal
from cumulo.spec.cluster import Cluster

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class RunCost:
    """Of `tokens` at the estimate's pace: nothing fails, nothing is written, the power is that of full load."""

    tokens: float
    days: float
    energy_mwh: float
    money: float  # USD

    @staticmethod
    def of(plan: Plan, cluster: Cluster, tokens: float) -> "RunCost":
        seconds = tokens / plan.estimate.tokens_per_s
        return RunCost(
            tokens,
            days=seconds / _DAY_S,
            energy_mwh=cluster.power_w * seconds / 3.6e9,
            money=cluster.price_per_hour * seconds / 3600,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may take; None: no limit."""

    deadline_days: float | None = None
    budget: float | None = None  # USD

    def __post_init__(self) -> None:
        for name, value in (("--deadline-days", self.deadline_days), ("--budget", self.budget)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value:g}")

    def missed(self, cost: RunCost) -> str | None:
        """What the run exceeds, in words; None: nothing."""
        if self.deadline_days is not None and cost.days > self.deadline_days:
            return f"the best plan takes {cost.days:.3g} days, and the deadline is {self.deadline_days:g}"
        if self.budget is not None and cost.money > self.budget:
            return f"the best plan costs ${cost.money:,.0f}, and the budget is ${self.budget:,.0f}"
        return None


def check_limits(
    plan: Plan, goal: TrainGoal, tokens: float | None, limits: Limits, searched: bool = True
) -> None:
    """A ConfigError that names the nearest number of GPUs that keeps the limits, where the plan does not."""
    if limits.deadline_days is None and limits.budget is None:
        return
    if tokens is None:
        raise ConfigError("a deadline or a budget is for a whole run: add --tokens, as in --tokens 15e12")
    missed = limits.missed(RunCost.of(plan, goal.cluster, tokens))
    if missed is None:
        return
    if not searched:
        raise ConfigError(f"{missed}; leave --fixed out to search for a layout that keeps it")
    gpus = goal.cluster.gpus
    # More GPUs are faster, fewer are cheaper: the nearest power of two that keeps both limits.
    for other in (2 * gpus, gpus // 2, 4 * gpus, gpus // 4, 8 * gpus, gpus // 8):
        if found := _plan_on(other, goal):
            cost = RunCost.of(found, replace(goal.cluster, gpus=other), tokens)
            if limits.missed(cost) is None:
                raise ConfigError(
                    f"{missed}; {other:,} GPUs would take {cost.days:.3g} days and ${cost.money:,.0f}"
                )
    raise ConfigError(f"{missed}; nothing between an eighth and 8 times the GPUs keeps it: relax the limit")


def _plan_on(gpus: int, goal: TrainGoal) -> Plan | None:
    try:
        cluster = replace(goal.cluster, gpus=gpus)
    except ConfigError:
        return None
    plans = search(replace(goal, cluster=cluster), keep=1).plans
    return plans[0] if plans else None
