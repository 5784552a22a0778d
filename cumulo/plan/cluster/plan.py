"""The 100,000-GPU question: fabric, layout, storage, failures, power and money of one training run, as one plan.
`cumulo plan cluster` calls it; `report` shows it.

    plan = plan_cluster(ClusterGoal("llama-3.1-405b", model, cluster, 6144, 8192, tokens=15e12))
    plan.sheet["goodput_tok_s"]

Every number of the plan is a figure of its sheet, with the formula it was worked out by.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cumulo.base.quantities import number, quantity
from cumulo.errors import ConfigError, CumuloError
from cumulo.plan.cluster.checkpoints import (
    CHOICES,
    SIMULATED,
    CheckpointTier,
    FailureOutcome,
    RecoveryChoice,
    Spares,
    SweepPoint,
    best_job_gpus,
    checkpoint_tiers,
    compare_recoveries,
    ettr_formula,
    gains,
    spares_needed,
    storage,
    sweep_intervals,
)
from cumulo.plan.cluster.fabric import (
    AxisTraffic,
    FabricChoice,
    TierCount,
    count_switches,
    other_fabrics,
    traffic_of,
)
from cumulo.plan.cluster.goal import ClusterGoal, job_sizes
from cumulo.plan.cluster.inference import InferenceGoal, inference_sheet
from cumulo.plan.cluster.sheet import Sheet
from cumulo.plan.network.collectives import Network
from cumulo.plan.search.search import Plan, search, timed
from cumulo.plan.search.why import refuse
from cumulo.plan.serve.search import ServePlan
from cumulo.spec.cluster import Cluster
from cumulo.spec.counting import parameter_count

_SIZES_TRIED = 4
_MARGIN = 1.04  # sizes that divide the batch are a little apart


def plan_training(goal: ClusterGoal, sheet: Sheet) -> tuple[Plan, Cluster]:
    node, parameters = goal.cluster.node, sheet["parameters"]
    if goal.fixed is not None:
        candidates = [goal.fixed.layout.world]
    else:
        most = goal.cluster.gpus - int(sheet["spare_nodes"]) * node.gpus
        if (
            goal.recovery == "restart"
        ):  # more GPUs would train less: they fail too often, and start too slowly
            most = min(most, max(node.gpus, best_job_gpus(goal.assumptions, node.gpus)))
        if most < 1:
            raise ConfigError(
                f"{sheet['in_repair']:,.3g} nodes would be in repair at once, so all {int(sheet['nodes']):,} are "
                f"spares and none is left to train; lower --repair or --failures, or ask for more GPUs"
            )
        candidates = [*job_sizes(goal, most, 18 * parameters, _SIZES_TRIED), most]
    best = _first(goal, candidates)
    if best is not None and goal.deadline_days is not None and goal.fixed is None:
        best = _in_time(goal, best, parameters)
    if best is None:
        try:
            refuse(goal.on(most))
        except CumuloError as error:
            beside = f"{int(sheet['spare_nodes']):,} of {int(sheet['nodes']):,} nodes are spares"
            raise ConfigError(f"{error} ({goal.model_name}; {beside})") from error
        raise ConfigError(f"no layout of {goal.model_name} on {most:,} GPUs was found")
    estimate, layout = best.estimate, best.job.layout
    held = goal.cluster.device.memory_bytes
    if estimate.memory is not None and estimate.memory.total > held:
        raise ConfigError(
            f"the layout {layout} needs {quantity(estimate.memory.total, 'B')} per GPU, but a "
            f"{goal.cluster.device.name} has {quantity(held, 'B')}; use a larger tp or pp, zero=3 or "
            "recompute=full, or omit --fixed"
        )
    _job_lines(best, sheet)
    return best, Cluster(node, layout.world, goal.cluster.fabric)


def _first(goal: ClusterGoal, candidates: list[int]) -> Plan | None:
    """The best plan of the first number of GPUs that has one."""
    for gpus in candidates:
        part = goal.on(gpus)
        found = [timed(goal.fixed, part)] if goal.fixed is not None else list(search(part, keep=1).plans)
        if found:
            return found[0]
    return None


def _in_time(goal: ClusterGoal, largest: Plan, parameters: float) -> Plan:
    """The smallest job that is sure to end in time: at the long end of its range."""
    deadline = goal.deadline_days or 0.0
    days = _longest_days(goal, largest)
    if days > deadline:
        raise ConfigError(
            f"{quantity(goal.tokens, 'tokens')} take up to {number(days)} days on "
            f"{largest.job.layout.world:,} GPUs, more than --deadline-days {deadline:g}: ask for more GPUs or "
            "fewer tokens, a larger --batch or --dtype float8"
        )
    best = largest
    for _ in range(_SIZES_TRIED):
        wanted = int(best.job.layout.world * _longest_days(goal, best) / deadline * _MARGIN)
        smaller = _first(goal, job_sizes(goal, wanted, 18 * parameters, _SIZES_TRIED))
        if smaller is None or smaller.job.layout.world >= best.job.layout.world:
            break
        if _longest_days(goal, smaller) > deadline:
            break
        best = smaller
    return best


def _longest_days(goal: ClusterGoal, plan: Plan) -> float:
    """With the slowest step of its interval, and restarts to the first order."""
    assumed, gpus = goal.assumptions, plan.job.layout.world
    tokens_per_s = plan.job.global_batch * plan.job.sequence_length / plan.estimate.interval.high
    restart_s = assumed["detect"] + assumed["initialise"] * gpus / 96000
    failures_per_s = gpus / 8 * assumed["failures"] / 1000 / 86400
    return goal.tokens / (tokens_per_s * math.exp(-restart_s * failures_per_s) * 0.99) / 86400


def _job_lines(best: Plan, sheet: Sheet) -> None:
    estimate, layout = best.estimate, best.job.layout
    given = {
        "job_gpus": layout.world,
        "step_s_low": estimate.interval.low,
        "step_s_high": estimate.interval.high,
        "batch": best.job.global_batch,
        "sequence": best.job.sequence_length,
        "step_s": estimate.step_s,
        "mfu": estimate.mfu,
    }
    sheet.fill("job", given, layout=str(layout))


_LEAST_ETTR = 0.01  # below it nothing is gained by planning on, and there are too many failures to play


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    goal: ClusterGoal
    training: Plan
    sheet: Sheet
    tiers: tuple[TierCount, ...]
    fabrics: tuple[FabricChoice, ...]  # others, for the same job
    traffic: tuple[AxisTraffic, ...]
    checkpoints: tuple[CheckpointTier, ...]  # best first
    sweeps: Mapping[str, tuple[SweepPoint, ...]]  # of each tier, over intervals
    outcome: FailureOutcome  # of the best tier at its best interval
    gains: list[str]  # figures of what one change would add to the goodput, largest first
    recoveries: tuple[RecoveryChoice, ...]
    inference: ServePlan | None = None


def plan_cluster(
    goal: ClusterGoal, seed: int = 0, inference: tuple[InferenceGoal, ServePlan] | None = None
) -> ClusterPlan:
    """`inference`: what the nodes beside the job serve, and the plan of it."""
    sheet = Sheet()
    sheet.figures.update(goal.assumptions.figures)
    _nodes(goal, sheet)
    training, job_cluster = plan_training(goal, sheet)
    network = Network(job_cluster)
    tiers = count_switches(goal.cluster, Network(goal.cluster).tiers, sheet)
    fabrics = other_fabrics(training.job, goal.cluster, sheet)
    traffic = traffic_of(training.job, network, dict(training.estimate.link_bytes), sheet)
    storage(goal, training.job, sheet)
    tiers_of = checkpoint_tiers(sheet, goal.recovery)
    checkpoints = tuple(sorted(tiers_of, key=lambda tier: tier.ettr, reverse=True))
    best = checkpoints[0]
    if best.ettr < _LEAST_ETTR:
        restart_s = sheet[f"restart_{best.key}_s"]
        raise ConfigError(
            f"the job would fail every {sheet['mttf_s']:,.0f} s and need {restart_s:,.0f} s to train again: it "
            f"would train less than {_LEAST_ETTR:.0%} of the time; take fewer GPUs, or lower --failures or --detect"
        )
    spares = Spares(int(sheet["nodes_beside_job"]), sheet["repair"] * 3600, sheet["broken_share"])
    sweeps = {tier.key: sweep_intervals(tier, spares, seed) for tier in checkpoints}
    sweep = sweeps[best.key]
    outcome = next(point.simulated for point in sweep if point.interval_s == best.interval_s)
    compare_recoveries(sheet, best, training.job.layout.dp)
    _results(goal, sheet, best, sweep, outcome)
    partner = best.key == "partner"
    why = "those in the memory of nodes go to storage now and then" if partner else ""
    sheet.fill("storage", key=best.key, least="flush" if partner else "write_s", why=why)
    for group in ("monitoring", "cooling", "materials"):
        sheet.fill(group)
    if inference is not None:
        inference_sheet(sheet, *inference)
    serving = "" if inference is None else "inference_nodes"
    sheet.fill("division", serving=serving and f" - {serving}", beside=serving and f" + {serving}")
    return ClusterPlan(
        goal,
        training,
        sheet,
        tiers,
        fabrics,
        traffic,
        checkpoints,
        sweeps,
        outcome,
        gains(best, sheet),
        CHOICES,
        inference[1] if inference is not None else None,
    )


def _nodes(goal: ClusterGoal, sheet: Sheet) -> None:
    cluster, device = goal.cluster, goal.cluster.device
    given = {
        "gpus": cluster.gpus,
        "gpus_per_node": cluster.node.gpus,
        "link_bytes_per_s": device.link_bytes_per_s,
        "nic_bytes_per_s": cluster.node.nic_bytes_per_s,
        "host_bytes_per_s": device.host_bytes_per_s,
    }
    sheet.fill("nodes", given, node=cluster.node.name)
    broken_per_day = sheet["failures_per_node_day"] * sheet["broken_share"]
    spares = spares_needed(int(sheet["nodes"]), broken_per_day, sheet["repair"] / 24)
    known = {"spare_nodes": spares, "parameters": parameter_count(goal.model)}
    sheet.fill("spares", known, model=goal.model_name)


def _results(
    goal: ClusterGoal,
    sheet: Sheet,
    best: CheckpointTier,
    sweep: tuple[SweepPoint, ...],
    outcome: FailureOutcome,
) -> None:
    device, node = goal.cluster.device, goal.cluster.node
    given = {
        "ettr_simulated": outcome.ettr,
        "ettr_simulated_low": outcome.ettr_low,
        "ettr_simulated_high": outcome.ettr_high,
        "lost_share": outcome.lost,
        "checkpoint_share": outcome.checkpoints,
        "restart_share": outcome.restarts,
        "repair_share": outcome.no_spare,
        "interval_simulated_s": max(sweep, key=lambda point: point.simulated.ettr).interval_s,
        "tokens": goal.tokens,
        "device_w": device.power_w,
        "node_w": node.power_w,
        "switch_ports": goal.cluster.fabric.switch_ports,
        "price": device.price_per_hour,
    }
    sheet.fill(
        "results",
        given,
        key=best.key,
        tier=best.name,
        formula=ettr_formula(best.key, best.stall, best.away),
        simulated=SIMULATED,
        ettr="ettr_replica" if goal.recovery == "replica" else "ettr_simulated",
        recovery=next(one.name for one in CHOICES if one.key == goal.recovery),
        device=device.name,
        node=node.name,
    )
    if goal.budget is not None:
        sheet.fill("budget", {"budget": goal.budget})
