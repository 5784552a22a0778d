"""Days, energy and money of a whole training run, from a step's estimate; and a number of GPUs that keeps a
deadline or a budget. Reports and limits use it."""

from dataclasses import dataclass, replace

from cumulo.base.quantities import between, number, quantity
from cumulo.errors import ConfigError
from cumulo.plan.search.run_stalls import Stalls, Storage, stalls_of
from cumulo.plan.search.search import Plan, search
from cumulo.plan.search.space import TrainGoal
from cumulo.spec.cluster import Cluster

_DAY_S = 86400.0
_MOST_DOUBLINGS = 6
_LEAST_GAIN = 0.03  # of the time: twice the GPUs that save less will not keep a deadline either


@dataclass(frozen=True, slots=True)
class RunCost:
    """Of `tokens` at the estimate's pace, stalls between steps included: nothing fails, power is of full load."""

    tokens: float
    days: float
    stalled_days: float  # of them, waiting for data and checkpoints
    energy_mwh: float
    money: float  # USD
    low: float = 1.0  # ends of the 90% interval, of all these but `tokens`, as factors
    high: float = 1.0

    @staticmethod
    def from_plan(plan: Plan, cluster: Cluster, tokens: float, stalls: Stalls) -> "RunCost":
        steps = tokens / plan.job.tokens_per_step
        seconds = steps * (plan.estimate.step_s + stalls.step_s)
        return RunCost(
            tokens,
            days=seconds / _DAY_S,
            stalled_days=steps * stalls.step_s / _DAY_S,
            energy_mwh=cluster.power_w * seconds / 3.6e9,
            money=cluster.price_per_hour * seconds / 3600,
            low=plan.estimate.interval.low / plan.estimate.step_s,
            high=plan.estimate.interval.high / plan.estimate.step_s,
        )


def _days(cost: RunCost) -> str:
    ends = f"{number(cost.low * cost.days)} to {number(cost.high * cost.days)} days"
    return f"{number(cost.days)} days (90% interval: {ends})"


def _money(cost: RunCost) -> str:
    ends = between(cost.low * cost.money, cost.high * cost.money, "USD")
    return f"{quantity(cost.money, 'USD')} (90% interval: {ends})"


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What a run may take; None: no limit."""

    deadline_days: float | None = None
    budget: float | None = None  # USD

    def __post_init__(self) -> None:
        for name, value in (("--deadline-days", self.deadline_days), ("--budget", self.budget)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value:g}")

    def missed(self, cost: RunCost) -> str | None:
        """What the run exceeds, in words; None: nothing."""
        if self.late(cost):
            return f"the best plan takes {_days(cost)}, and the deadline is {self.deadline_days:g} days"
        if self.budget is not None and cost.money > self.budget:
            return f"the best plan costs {_money(cost)}, and the budget is {quantity(self.budget, 'USD')}"
        return None

    def late(self, cost: RunCost) -> bool:
        return self.deadline_days is not None and cost.days > self.deadline_days


def check_limits(
    plan: Plan,
    goal: TrainGoal,
    tokens: float | None,
    limits: RunLimits,
    storage: Storage,
    searched: bool = True,
) -> None:
    """A ConfigError that names a number of GPUs that keeps the limits, where the plan does not."""
    if limits.deadline_days is None and limits.budget is None:
        return
    if tokens is None:
        raise ConfigError(
            "--deadline-days and --budget need the length of the run: add --tokens, for example --tokens 15e12"
        )
    cost = _cost(plan, goal, tokens, storage)
    missed = limits.missed(cost)
    if missed is None:
        return
    if not searched:
        raise ConfigError(f"{missed}; omit --fixed to search for a layout within the limit")
    asked = _Asked(goal, tokens, limits, storage)
    raise ConfigError(f"{missed}; {_sooner(asked, cost) if limits.late(cost) else _cheaper(asked)}")


@dataclass(frozen=True, slots=True)
class _Asked:
    goal: TrainGoal
    tokens: float
    limits: RunLimits
    storage: Storage

    def on(self, gpus: int) -> RunCost | None:
        """The best plan's cost on so many GPUs; None: there is none."""
        try:
            goal = replace(self.goal, cluster=replace(self.goal.cluster, gpus=gpus))
            plans = search(goal, keep=1).plans
            return _cost(plans[0], goal, self.tokens, self.storage) if plans else None
        except ConfigError:  # no whole nodes, or a step longer than the time between two checkpoints
            return None


def _cost(plan: Plan, goal: TrainGoal, tokens: float, storage: Storage) -> RunCost:
    stalls = stalls_of(plan.job, goal.cluster, plan.estimate.step_s, storage)
    return RunCost.from_plan(plan, goal.cluster, tokens, stalls)


def _sooner(asked: _Asked, now: RunCost) -> str:
    """More GPUs are faster, until the batch has no more to share."""
    limits, gpus = asked.limits, asked.goal.cluster.gpus
    best, best_gpus = now, gpus
    for _ in range(_MOST_DOUBLINGS):
        more = asked.on(2 * best_gpus)
        if more is None or more.days > (1 - _LEAST_GAIN) * best.days:
            break
        best, before = more, best_gpus
        best_gpus *= 2
        if not limits.late(best):
            enough, cost = _fewest(asked, before, best_gpus, best)
            words = f"{enough:,} GPUs would take {_days(cost)} and {_money(cost)}"
            over = limits.budget is not None and cost.money > limits.budget
            return f"{words}, which is over the budget: relax one of the two" if over else words
    most = (
        f"{best_gpus:,} GPUs take {_days(best)}"
        if best_gpus > gpus
        else "twice as many cannot share the batch"
    )
    return (
        f"more GPUs of this kind do not keep it either ({most}): raise --batch, which is now "
        f"{asked.goal.global_batch:,} sequences, compute in fewer bits with --dtype, take a faster --device, or "
        f"train on fewer --tokens"
    )


def _fewest(asked: _Asked, too_few: int, enough: int, cost: RunCost) -> tuple[int, RunCost]:
    """Of whole nodes between a number of GPUs that is too few and twice as many: quarters of the way."""
    for quarters in (1, 2, 3):
        other = too_few + quarters * (enough - too_few) // 4
        found = asked.on(other)
        if found is not None and not asked.limits.late(found):
            return other, found
    return enough, cost


def _cheaper(asked: _Asked) -> str:
    """Fewer GPUs wait less for one another."""
    gpus = asked.goal.cluster.gpus
    for part in (2, 4, 8):
        cost = asked.on(gpus // part) if gpus % part == 0 else None
        if cost is not None and asked.limits.missed(cost) is None:
            return f"{gpus // part:,} GPUs would take {_days(cost)} and {_money(cost)}"
    return "nothing down to an eighth of the GPUs keeps it: raise --budget, or train on fewer --tokens"
