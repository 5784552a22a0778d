"""The 100,000-GPU question: fabric, layout, storage, failures, power and money of one training run, as one plan.
`cumulo plan cluster` calls it; `report` shows it.

    plan = plan_cluster(ClusterGoal("llama-3.1-405b", model, cluster, 6144, 8192, tokens=15e12))
    plan.sheet["goodput_tok_s"]

Every number of the plan is a figure of its sheet, with the formula it was worked out by.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from cumulo.base.quantities import number, quantity
from cumulo.errors import ConfigError, CumuloError
from cumulo.plan.cluster.checkpoints import (
    CHOICES,
    SIMULATED,
    CheckpointTier,
    RecoveryChoice,
    SweepPoint,
    best_job_gpus,
    checkpoint_tiers,
    compare_recoveries,
    ettr_formula,
    gains,
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
from cumulo.plan.cluster.failures import FailureOutcome, Spares, spares_needed
from cumulo.plan.cluster.goal import ClusterGoal, job_sizes
from cumulo.plan.cluster.inference import InferenceGoal, inference_sheet
from cumulo.plan.cluster.sheet import Sheet, cooling_sheet, materials_sheet, monitoring_sheet, storage_sheet
from cumulo.plan.network.collectives import Network
from cumulo.plan.search.search import Plan, search, timed
from cumulo.plan.search.why import refuse
from cumulo.plan.serve.search import ServePlan
from cumulo.spec.cluster import Cluster
from cumulo.spec.counting import parameter_count

_SIZES_TRIED = 4
_MARGIN = 1.04  # sizes that divide the batch are a little apart


def plan_training(goal: ClusterGoal, sheet: Sheet) -> tuple[Plan, Cluster]:
    node = goal.cluster.node
    parameters = sheet.given(
        "parameters", parameter_count(goal.model), "parameters", "model size", f"{goal.model_name}"
    )
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
    restart_s = assumed.detect.value + assumed.initialise.value * gpus / 96000
    failures_per_s = gpus / 8 * assumed.failures.value / 1000 / 86400
    return goal.tokens / (tokens_per_s * math.exp(-restart_s * failures_per_s) * 0.99) / 86400


def _job_lines(best: Plan, sheet: Sheet) -> None:
    estimate, layout = best.estimate, best.job.layout
    sheet.given("job_gpus", layout.world, "GPUs", "GPUs of the job", f"layout {layout}")
    sheet.work_out("job_nodes", "ceil(job_gpus / gpus_per_node)", "nodes", "nodes of the job")
    sheet.work_out("nodes_beside_job", "nodes - job_nodes", "nodes", "nodes that are not part of the job")
    sheet.given(
        "step_s_low", estimate.interval.low, "s", "step time, low end", "90% interval of the cost model"
    )
    sheet.given(
        "step_s_high", estimate.interval.high, "s", "step time, high end", "90% interval of the cost model"
    )
    sheet.given("batch", best.job.global_batch, "sequences", "batch", "asked for")
    sheet.given("sequence", best.job.sequence_length, "tokens", "sequence", "asked for")
    sheet.given(
        "step_s",
        estimate.step_s,
        "s",
        "step time",
        "cost model with a simulated pipeline schedule: docs/plan-time.md",
    )
    sheet.given("mfu", estimate.mfu, "share", "MFU: model FLOPs over peak", "cost model: docs/plan-time.md")
    sheet.work_out("tokens_per_step", "batch * sequence", "tokens", "tokens per step")
    sheet.work_out("training_tok_s", "tokens_per_step / step_s", "tokens/s", "training throughput")
    for end, other in (("low", "high"), ("high", "low")):
        rate = f"tokens_per_step / step_s_{other}"
        sheet.work_out(f"training_tok_s_{end}", rate, "tokens/s", f"training throughput, {end} end")
        sheet.work_out(f"mfu_{end}", f"mfu * step_s / step_s_{other}", "share", f"MFU, {end} end")


_ENDS = (("", ""), ("_low", "_high"), ("_high", "_low"))  # of what grows as another figure falls
_LEAST_ETTR = 0.01  # below it nothing is gained by planning on, and there are too many failures to play


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    goal: ClusterGoal
    training: Plan
    job_cluster: Cluster  # what the job runs on; the rest are spares
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
    for one in fields(goal.assumptions):
        assumed = getattr(goal.assumptions, one.name)
        sheet.given(one.name, assumed.value, assumed.unit, assumed.label, assumed.source)
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
    recoveries = compare_recoveries(sheet, best, training.job.layout.dp)
    _results(goal, sheet, best, sweep, outcome)
    storage_sheet(sheet, best.key)
    monitoring_sheet(sheet)
    cooling_sheet(sheet)
    materials_sheet(sheet)
    if inference is not None:
        inference_sheet(sheet, *inference)
    _division(sheet, inference is not None)
    return ClusterPlan(
        goal,
        training,
        job_cluster,
        sheet,
        tiers,
        fabrics,
        traffic,
        checkpoints,
        sweeps,
        outcome,
        gains(best, sheet),
        recoveries,
        inference[1] if inference is not None else None,
    )


def _division(sheet: Sheet, serves: bool) -> None:
    """Who gets the nodes."""
    taken = "job_nodes * (1 + further_jobs) + spare_nodes" + (" + inference_nodes" if serves else "")
    beside = "nodes - spare_nodes" + (" - inference_nodes" if serves else "")
    sheet.work_out(
        "further_jobs",
        f"max(0, floor(({beside}) / job_nodes) - 1)",
        "jobs",
        "further jobs of this size that fit",
    )
    sheet.work_out("idle_nodes", f"nodes - ({taken})", "nodes", "nodes with nothing to do")


def _nodes(goal: ClusterGoal, sheet: Sheet) -> None:
    cluster = goal.cluster
    sheet.given("gpus", cluster.gpus, "GPUs", "GPUs in all", "asked for")
    sheet.given(
        "gpus_per_node", cluster.node.gpus, "GPUs", "GPUs of a node", f"catalogue: {cluster.node.name}"
    )
    sheet.work_out("nodes", "ceil(gpus / gpus_per_node)", "nodes", "nodes in all")
    for name, rate, label in (
        ("link_bytes_per_s", cluster.device.link_bytes_per_s, "scale-up links of a GPU, each way"),
        ("nic_bytes_per_s", cluster.node.nic_bytes_per_s, "network of a GPU, each way"),
        ("host_bytes_per_s", cluster.device.host_bytes_per_s, "from a GPU to its host"),
    ):
        sheet.given(name, rate, "bytes/s", label, "catalogue")
    sheet.work_out(
        "failures_per_node_day",
        "failures / 1000 * gpus_per_node / 8",
        "per day",
        "failures of one node that stop the job",
        "taken as proportional to a node's GPUs",
    )
    sheet.work_out(
        "in_repair",
        "nodes * failures_per_node_day * broken_share * repair / 24",
        "nodes",
        "nodes in repair at once, on average",
        "Little's law",
    )
    sheet.given(
        "spare_nodes",
        spares_needed(
            int(sheet["nodes"]), sheet["failures_per_node_day"] * sheet["broken_share"], sheet["repair"] / 24
        ),
        "nodes",
        "spare nodes",
        "the fewest with which the job waits for a repair at most 1% of the time: nodes in repair at once are "
        "Poisson-distributed around in_repair (M/G/∞ queue)",
    )


def _results(
    goal: ClusterGoal,
    sheet: Sheet,
    best: CheckpointTier,
    sweep: tuple[SweepPoint, ...],
    outcome: FailureOutcome,
) -> None:
    key = best.key
    formula = ettr_formula(key, best.stall, best.away)
    sheet.work_out("ettr_formula", formula, "share", "ETTR, share of time that trains, by formula", best.name)
    sheet.given(
        "ettr_simulated", outcome.ettr, "share", "ETTR, share of time that trains, simulated", SIMULATED
    )
    for name, share, label in (
        ("ettr_simulated_low", outcome.ettr_low, "1 in 20 simulated runs trains less than"),
        ("ettr_simulated_high", outcome.ettr_high, "1 in 20 simulated runs trains more than"),
        ("lost_share", outcome.lost, "share of time that repeats work lost in failures"),
        ("checkpoint_share", outcome.checkpoints, "share of time that checkpoints stop training"),
        ("restart_share", outcome.restarts, "share of time between a failure and the restart"),
        ("repair_share", outcome.no_spare, "share of time that waits for a repair"),
    ):
        sheet.given(name, share, "share", label, SIMULATED)
    how = next(one.name for one in CHOICES if one.key == goal.recovery)
    source = "ettr_replica" if goal.recovery == "replica" else "ettr_simulated"
    sheet.work_out("ettr", source, "share", "ETTR, share of time that trains", how)
    half = "(ettr_simulated_high - ettr_simulated_low) / 2"
    sheet.work_out("ettr_range", half, "share", "half of the range of simulated runs")
    sheet.work_out("ettr_low", "max(0, ettr - ettr_range)", "share", "ETTR, low end")
    sheet.work_out("ettr_high", "min(1, ettr + ettr_range)", "share", "ETTR, high end")
    simulated_best = max(sweep, key=lambda point: point.simulated.ettr)
    sheet.given(
        "interval_simulated_s", simulated_best.interval_s, "s", "best interval of those simulated", SIMULATED
    )
    sheet.work_out(
        "write_behind",
        f"checkpoint_bytes / interval_{key}_s / 1e9",
        "GB/s",
        "storage bandwidth if every checkpoint is written to it",
    )
    sheet.work_out("goodput_tok_s", "training_tok_s * ettr", "tokens/s", "goodput")
    for end in ("low", "high"):
        formula = f"training_tok_s_{end} * ettr_{end}"
        sheet.work_out(f"goodput_tok_s_{end}", formula, "tokens/s", f"goodput, {end} end")
    sheet.given("tokens", goal.tokens, "tokens", "tokens to train on", "asked for")
    for end, other in _ENDS:
        label = "run time" + (f", {end[1:]} end" if end else "")
        sheet.work_out(f"days{end}", f"tokens / goodput_tok_s{other} / 86400", "days", label)
    sheet.work_out("failures_in_run", "days * 86400 * ettr / mttf_s", "failures", "failures during the run")
    device, node = goal.cluster.device, goal.cluster.node
    sheet.given("device_w", device.power_w, "W", "power of a GPU", f"catalogue: {device.name}")
    sheet.given("node_w", node.power_w, "W", "power of the rest of a node", f"catalogue: {node.name}")
    sheet.given("switch_ports", goal.cluster.fabric.switch_ports, "ports", "ports of a switch", "catalogue")
    sheet.work_out("network_w", "switches * switch_ports * switch_w", "W", "power of the switches")
    sheet.work_out("machines_w", "gpus * device_w + nodes * node_w + network_w", "W", "power of all machines")
    sheet.work_out("facility_w", "machines_w * pue", "W", "power of the building")
    sheet.work_out(
        "charged_gpus",
        "min(nodes, job_nodes + spare_nodes * job_nodes / nodes) * gpus_per_node",
        "GPUs",
        "GPUs charged, with a share of the spares",
    )
    sheet.work_out(
        "charged_share", "charged_gpus / gpus", "share", "share of the cluster that the run is charged for"
    )
    for end, other in _ENDS:
        label = "energy for a trillion tokens" + (f", {end[1:]} end" if end else "")
        formula = f"facility_w * charged_share * 1e12 / goodput_tok_s{other} / 3.6e9"
        sheet.work_out(f"energy_mwh{end}", formula, "MWh", label)
    sheet.given(
        "price",
        device.price_per_hour,
        "USD/h",
        "price of a GPU",
        f"--price, or the catalogue's guide for {device.name}",
    )
    for end, other in _ENDS:
        label = "price of a trillion tokens" + (f", {end[1:]} end" if end else "")
        formula = f"charged_gpus * price * 1e12 / goodput_tok_s{other} / 3600"
        sheet.work_out(f"cost_trillion{end}", formula, "USD", label)
    for end in ("", "_low", "_high"):
        label = "price of the run" + (f", {end[1:]} end" if end else "")
        sheet.work_out(f"cost_run{end}", f"charged_gpus * price * days{end} * 24", "USD", label)
    if goal.budget is not None:
        sheet.given("budget", goal.budget, "USD", "budget", "--budget")
        for end, other in _ENDS:
            label = "tokens that the budget pays for" + (f", {end[1:]} end" if end else "")
            sheet.work_out(f"budget_tokens{end}", f"tokens * budget / cost_run{other}", "tokens", label)
