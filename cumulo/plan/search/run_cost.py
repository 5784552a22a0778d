"""Days, energy and money of a whole training run, from a step's estimate; and a number of GPUs that keeps a
deadline or a budget. Reports and limits use it."""

import math
from dataclasses import dataclass, replace

from cumulo.base.quantities import between, number, quantity
from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.plan.cluster.checkpoints import Recovery, best_interval_s
from cumulo.plan.cluster.goal import assumptions
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.states import stage_elements, state_bytes
from cumulo.plan.search.search import Plan, search
from cumulo.plan.search.space import TrainGoal
from cumulo.spec.cluster import Cluster

# What a run waits for between its steps: data to be read, checkpoints to be saved. `cumulo plan train` shows it.
#
# Symbols: b bytes of a token on disk, R the rate of a node's reading and writing, D bytes of a checkpoint, N
# devices, H the rate between a device and its host, M the job's mean time to failure, τ training between two
# checkpoints.
#
#     data          max(0, b · tokens that the ranks of a node read in a step / R − step)
#     checkpoints   C / τ of the time, with C = D / (R · nodes) if training stops until all is written, and
#                   C = D / (N H) if it stops only for the copy to host memory, which is written behind it
#     τ             Daly (2006), equation 37, for M; no shorter than a step, nor than ten times what is written
#                   behind

# Share of the time in which storage is written behind training: data are read from it, too.
MOST_WRITING = 0.1


@dataclass(frozen=True, slots=True)
class Storage:
    """Where data come from and checkpoints go, and how they go there."""

    # What a node reads and writes; the Llama 3 cluster sustained 2 TB/s for 2,048 nodes (Grattafiori et al. 2024).
    node_bytes_per_s: float = 1e9
    asynchronous: bool = True  # training goes on while a checkpoint is written
    interval_s: float | None = None  # between two checkpoints; None: the best for the rate of failures

    def __post_init__(self) -> None:
        for name, value, unit, instead in (
            ("--storage-gb-s", self.node_bytes_per_s, 1e9, "1 is usual"),
            ("--checkpoint-minutes", self.interval_s, 60, "leave it out for the best"),
        ):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be more than 0 and finite, got {value / unit:g}; {instead}")


@dataclass(frozen=True, slots=True)
class Stalls:
    """Stalls of an average step."""

    data_s: float  # waited for data
    checkpoint_s: float  # waited for checkpoints, over the steps between two of them
    read_bytes_per_s: float  # that a node must read to keep up
    checkpoint_bytes: int  # of one, all ranks together
    interval_s: float  # between two
    stop_s: float  # that one stops training
    write_s: float  # that it takes to be written

    @property
    def step_s(self) -> float:
        return self.data_s + self.checkpoint_s

    def rows(self) -> tuple[tuple[str, float], ...]:
        return (("data loading", self.data_s), ("checkpoints", self.checkpoint_s))


def stalls_of(job: TrainJob, cluster: Cluster, step_s: float, storage: Storage) -> Stalls:
    layout = job.layout
    token_bytes = 2 if job.model.vocab_size <= 65536 else 4
    # Every rank reads the sequences of its data-parallel place, whether or not another one reads the same.
    read = min(cluster.node.gpus, layout.world) * job.tokens_per_step / layout.dp * token_bytes
    saved = checkpoint_bytes(job)
    write_s = saved / (storage.node_bytes_per_s * cluster.nodes)
    stop_s = saved / layout.world / cluster.device.host_bytes_per_s if storage.asynchronous else write_s
    interval_s = storage.interval_s or _best_interval_s(cluster, step_s, stop_s, write_s, storage)
    away_s = write_s if storage.asynchronous else 0.0
    least_minutes = math.ceil(max(step_s, away_s) / 6) / 10
    if interval_s < away_s:
        raise ConfigError(
            f"a checkpoint of {quantity(saved / 1e9, 'GB')} takes {quantity(write_s, 's')} to be written, and the "
            f"next is due after {quantity(interval_s, 's')}; raise --checkpoint-minutes to {least_minutes:g} or "
            "--storage-gb-s"
        )
    if interval_s < step_s:
        raise ConfigError(
            f"a checkpoint is saved between two steps, and a step takes {quantity(step_s, 's')}, longer than the "
            f"{quantity(interval_s, 's')} between two checkpoints; raise --checkpoint-minutes to {least_minutes:g}"
        )
    return Stalls(
        data_s=max(0.0, read / storage.node_bytes_per_s - step_s),
        checkpoint_s=stop_s * step_s / interval_s,
        read_bytes_per_s=read / step_s,
        checkpoint_bytes=saved,
        interval_s=interval_s,
        stop_s=stop_s,
        write_s=write_s,
    )


def checkpoint_bytes(job: TrainJob) -> int:
    """Weights, their float32 copy and moments in full width, each once: what `cumulo train` writes."""
    whole = replace(job, layout=Layout(), offload_optimizer=False)
    if job.optimizer == "adamw8bit":  # widened, so that blocks may begin elsewhere when it is read again
        whole = replace(whole, optimizer="adamw")
    states = state_bytes(whole, stage_elements(whole, ((0, 0),)))
    return states.weights + states.optimizer


def _best_interval_s(
    cluster: Cluster, step_s: float, stop_s: float, write_s: float, storage: Storage
) -> float:
    per_node_day = assumptions()["failures"] / 1000 * cluster.node.gpus / 8
    away_s = write_s if storage.asynchronous else 0.0
    recovery = Recovery(
        86400 / (cluster.nodes * per_node_day),
        stop_s,
        0.0,
        least_interval_s=max(step_s, away_s / MOST_WRITING),
        delay_s=away_s,
    )
    return best_interval_s(recovery)


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
) -> str:
    """A ConfigError that names a number of GPUs that keeps the limits, where the plan does not; else what to be
    told where the range of its cost reaches beyond them."""
    if limits.deadline_days is None and limits.budget is None:
        return ""
    if tokens is None:
        raise ConfigError(
            "--deadline-days and --budget need the length of the run: add --tokens, for example --tokens 15e12"
        )
    cost = _cost(plan, goal, tokens, storage)
    missed = limits.missed(cost)
    if missed is None:
        late = limits.missed(replace(cost, days=cost.days * cost.high, money=cost.money * cost.high))
        return (
            "the limit is kept in the middle of the range, but not at its end: plan with reserve"
            if late
            else ""
        )
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
    """The fewest whole nodes between a number of GPUs that is too few and twice as many: quarters of the way."""
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
