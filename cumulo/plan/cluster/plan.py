"""The 100,000-GPU question: fabric, layout, storage, failures, power and money of one training run, as one plan.
`cumulo plan cluster` calls it; `report` shows it.

    plan = plan_cluster(ClusterGoal("llama-3.1-405b", model, cluster, 6144, 8192, tokens=15e12))
    plan.sheet["goodput_tok_s"]

Every number of the plan is a figure of its sheet, with the formula it was worked out by.
"""

from collections.abc import Mapping, Sequence
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
    spares_at,
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
from cumulo.plan.cluster.goal import ClusterGoal, fixed_part, job_sizes
from cumulo.plan.cluster.inference import InferenceGoal, inference_sheet
from cumulo.plan.cluster.sheet import Sheet
from cumulo.plan.network.collectives import Network
from cumulo.plan.search.search import Plan, search
from cumulo.plan.search.unnamed import remarks, timed_unnamed, widened
from cumulo.plan.search.why import refuse
from cumulo.plan.serve.search import ServePlan
from cumulo.spec.cluster import Cluster
from cumulo.spec.counting import parameter_count

_SIZES_TRIED = 4
_MARGIN = 1.04  # sizes that divide the batch are a little apart


def plan_training(goal: ClusterGoal, sheet: Sheet) -> tuple[Plan, tuple[str, ...]]:
    """The plan of the job, and what was assumed of a given layout."""
    if goal.fixed:
        part = fixed_part(goal)
        best, fits = timed_unnamed(goal.fixed, part)
        assumed = tuple(remarks(goal.fixed, best, fits, part.memory_limit_bytes))
    else:
        best, assumed = _searched(goal, sheet), ()
    estimate, layout = best.estimate, best.job.layout
    held = goal.cluster.device.memory_bytes
    if estimate.memory is not None and estimate.memory.total > held:
        raise ConfigError(
            f"the layout {layout} needs {quantity(estimate.memory.total, 'B')} per GPU, but a "
            f"{goal.cluster.device.name} has {quantity(held, 'B')}; use a larger tp or pp, zero=3 or "
            "recompute=full, or omit --fixed"
        )
    return best, assumed


def _searched(goal: ClusterGoal, sheet: Sheet) -> Plan:
    node = goal.cluster.node
    most = goal.cluster.gpus - int(sheet["spare_nodes"]) * node.gpus
    if goal.recovery == "restart":  # more GPUs would train less: they fail too often, and start too slowly
        most = min(most, max(node.gpus, best_job_gpus(goal.assumptions, node.gpus)))
    if most < 1:
        raise ConfigError(
            f"{sheet['in_repair']:,.3g} nodes would be in repair at once, so all {int(sheet['nodes']):,} are "
            f"spares and none is left to train; lower --repair or --failures, or ask for more GPUs"
        )
    best = _first(goal, most, sheet, [most])
    if best is not None and goal.deadline_days is not None:
        best = _in_time(goal, best, sheet)
    if best is None:
        try:
            refuse(goal.on(most))
        except CumuloError as error:
            beside = f"{int(sheet['spare_nodes']):,} of {int(sheet['nodes']):,} nodes are spares"
            raise ConfigError(f"{error} ({goal.model_name}; {beside})") from error
        raise ConfigError(f"no layout of {goal.model_name} on {most:,} GPUs was found")
    return best


def _first(goal: ClusterGoal, most: int, sheet: Sheet, further: Sequence[int] = ()) -> Plan | None:
    """The best plan of the first number of GPUs that has one: the promising ones up to `most`, then `further`."""
    for gpus in (*job_sizes(goal, most, 18 * sheet["parameters"], _SIZES_TRIED), *further):
        part = goal.on(gpus)
        for plan in search(part, keep=1).plans:
            return widened(plan, part)
    return None


def _in_time(goal: ClusterGoal, largest: Plan, sheet: Sheet) -> Plan:
    """The smallest job that is sure to end in time: at the long end of its range."""
    deadline = goal.deadline_days or 0.0
    days = _longest_days(goal, largest, sheet)
    if days > deadline:
        raise ConfigError(
            f"{quantity(goal.tokens, 'tokens')} take up to {number(days)} days on "
            f"{largest.job.layout.world:,} GPUs, more than --deadline-days {deadline:g}: ask for more GPUs or "
            "fewer tokens, a larger --batch or --dtype float8"
        )
    best = largest
    for _ in range(_SIZES_TRIED):
        wanted = int(best.job.layout.world * _longest_days(goal, best, sheet) / deadline * _MARGIN)
        smaller = _first(goal, wanted, sheet)
        if smaller is None or smaller.job.layout.world >= best.job.layout.world:
            break
        if _longest_days(goal, smaller, sheet) > deadline:
            break
        best = smaller
    return best


def _longest_days(goal: ClusterGoal, plan: Plan, sheet: Sheet) -> float:
    """At the low end of the goodput by formula; simulated runs are a little below."""
    scratch = Sheet()
    scratch.figures.update(sheet.figures)
    _failures(goal, plan, scratch)
    return goal.tokens / (0.99 * scratch[f"goodput_{goal.recovery}_low"]) / 86400


def _failures(goal: ClusterGoal, plan: Plan, sheet: Sheet) -> tuple[CheckpointTier, ...]:
    """The job, its failures and its checkpoints by formula; the ways to keep them, best first."""
    _job_lines(plan, sheet)
    storage(goal, plan.job, sheet)
    tiers = sorted(checkpoint_tiers(sheet, goal.recovery), key=lambda tier: tier.ettr, reverse=True)
    best = tiers[0]
    if best.ettr < _LEAST_ETTR:
        restart_s = sheet[f"restart_{best.key}_s"]
        raise ConfigError(
            f"the job would fail every {sheet['mttf_s']:,.0f} s and need {restart_s:,.0f} s to train again: it "
            f"would train less than {_LEAST_ETTR:.0%} of the time; take fewer GPUs, or lower --failures or --detect"
        )
    compare_recoveries(sheet, best, plan.job.layout.dp)
    return tuple(tiers)


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
    assumed: tuple[str, ...] = ()  # of a layout that was given
    inference: ServePlan | None = None


def plan_cluster(
    goal: ClusterGoal, seed: int = 0, inference: tuple[InferenceGoal, ServePlan] | None = None
) -> ClusterPlan:
    """`inference`: what the nodes beside the job serve, and the plan of it."""
    sheet = Sheet()
    sheet.figures.update(goal.assumptions.figures)
    _nodes(goal, sheet)
    training, assumed = plan_training(goal, sheet)
    checkpoints = _failures(goal, training, sheet)
    network = Network(Cluster(goal.cluster.node, training.job.layout.world, goal.cluster.fabric))
    tiers = count_switches(goal.cluster, Network(goal.cluster).tiers, sheet)
    fabrics = other_fabrics(training.job, goal.cluster, sheet)
    traffic = traffic_of(training.job, network, dict(training.estimate.link_bytes), sheet)
    best = checkpoints[0]
    spares = Spares(int(sheet["nodes_beside_job"]), sheet["repair"] * 3600, sheet["broken_share"])
    sweeps = {tier.key: sweep_intervals(tier, spares, seed) for tier in checkpoints}
    sweep = sweeps[best.key]
    outcome = next(point.simulated for point in sweep if point.interval_s == best.interval_s)
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
        assumed,
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
    known = {"spare_nodes": spares_at(sheet, sheet["failures"]), "parameters": parameter_count(goal.model)}
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
        "ettr_runs_low": outcome.ettr_low,
        "ettr_runs_high": outcome.ettr_high,
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
        choice=goal.recovery,
        recovery=next(one.name for one in CHOICES if one.key == goal.recovery),
        device=device.name,
        node=node.name,
    )
    if goal.budget is not None:
        sheet.fill("budget", {"budget": goal.budget})
