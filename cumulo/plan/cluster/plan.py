"""The 100,000-GPU question: fabric, layout, storage, failures, power and money of one training run, as one plan.
`cumulo plan cluster` calls it; `report` shows it.

    plan = plan_cluster(ClusterGoal("llama-3.1-405b", model, cluster, 6144, 8192, tokens=15e12))
    plan.sheet["goodput_tok_s"]

Every number of the plan is a figure of its sheet, with the formula it was worked out by.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from cumulo.errors import ConfigError, CumuloError
from cumulo.plan.cluster.checkpoints import (
    SIMULATED,
    CheckpointTier,
    SweepPoint,
    checkpoint_tiers,
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
from cumulo.plan.cluster.sheet import Sheet
from cumulo.plan.network.collectives import Network
from cumulo.plan.search.search import Plan, search, timed
from cumulo.plan.search.why_not import refuse
from cumulo.spec.cluster import Cluster
from cumulo.spec.counting import parameter_count

_SIZES_TRIED = 4
_LEAST_ETTR = 0.01  # below it nothing is gained by planning on, and there are too many failures to play
_ENOUGH_TRAINED = 0.75  # of the time: a job of half the GPUs cannot train as much then


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


def plan_cluster(goal: ClusterGoal, seed: int = 0) -> ClusterPlan:
    sheet = Sheet()
    for one in fields(goal.assumptions):
        assumed = getattr(goal.assumptions, one.name)
        sheet.given(one.name, assumed.value, assumed.unit, assumed.label, assumed.source)
    _nodes(goal, sheet)
    training, job_cluster = _training(goal, sheet)
    network = Network(job_cluster)
    tiers = count_switches(goal.cluster, Network(goal.cluster).tiers, sheet)
    fabrics = other_fabrics(training.job, goal.cluster, sheet)
    traffic = traffic_of(training.job, network, dict(training.estimate.link_bytes), sheet)
    storage(goal, training.job, sheet)
    checkpoints = tuple(sorted(checkpoint_tiers(sheet), key=lambda tier: tier.ettr, reverse=True))
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
    _results(goal, sheet, best, sweep, outcome)
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
    )


def _nodes(goal: ClusterGoal, sheet: Sheet) -> None:
    cluster = goal.cluster
    sheet.given("gpus", cluster.gpus, "", "GPUs in all", "asked for")
    sheet.given("gpus_per_node", cluster.node.gpus, "", "GPUs of a node", f"catalogue: {cluster.node.name}")
    sheet.work_out("nodes", "ceil(gpus / gpus_per_node)", "", "nodes in all")
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


def _training(goal: ClusterGoal, sheet: Sheet) -> tuple[Plan, Cluster]:
    node = goal.cluster.node
    parameters = sheet.given(
        "parameters", parameter_count(goal.model), "", "parameters", f"{goal.model_name}"
    )
    if goal.fixed is not None:
        candidates = [goal.fixed.layout.world]
    else:
        most = goal.cluster.gpus - int(sheet["spare_nodes"]) * node.gpus
        if most < 1:
            raise ConfigError(
                f"{sheet['in_repair']:,.3g} nodes would be in repair at once, so all {int(sheet['nodes']):,} are "
                f"spares and none is left to train; lower --repair or --failures, or ask for more GPUs"
            )
        candidates = [*job_sizes(goal, most, 18 * parameters, _SIZES_TRIED), most]
    best = _first(goal, candidates)
    if best is not None and goal.fixed is None:
        best = _best_size(goal, best, parameters)
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
            f"the layout {layout} needs {estimate.memory.total / 2**30:.1f} GiB per GPU, but a "
            f"{goal.cluster.device.name} has {held / 2**30:.1f} GiB; use a larger tp or pp, zero=3 or "
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


def _best_size(goal: ClusterGoal, largest: Plan, parameters: float) -> Plan:
    """Of the largest job and jobs of half as many GPUs, and so on, the one with the most goodput: a job that fails
    often trains less on more GPUs. Where most of the time trains, half as many cannot do more."""
    best, best_share = largest, _trained_share(goal, largest)
    best_goodput = largest.estimate.tokens_per_s * best_share
    gpus, share = largest.job.layout.world, best_share
    while share < _ENOUGH_TRAINED and gpus > goal.cluster.node.gpus:
        smaller = _first(goal, job_sizes(goal, gpus // 2, 18 * parameters, _SIZES_TRIED))
        if smaller is None:
            break
        gpus, share = smaller.job.layout.world, _trained_share(goal, smaller)
        if smaller.estimate.tokens_per_s * share > best_goodput:
            best, best_goodput = smaller, smaller.estimate.tokens_per_s * share
    return best


def _trained_share(goal: ClusterGoal, plan: Plan) -> float:
    """ETTR of a job by formula, under its best way to keep checkpoints."""
    sheet = Sheet()
    for one in fields(goal.assumptions):
        assumed = getattr(goal.assumptions, one.name)
        sheet.given(one.name, assumed.value, assumed.unit, assumed.label, assumed.source)
    _nodes(goal, sheet)
    sheet.given("parameters", parameter_count(goal.model), "", "parameters", goal.model_name)
    _job_lines(plan, sheet)
    storage(goal, plan.job, sheet)
    return max(tier.ettr for tier in checkpoint_tiers(sheet))


def _job_lines(best: Plan, sheet: Sheet) -> None:
    estimate, layout = best.estimate, best.job.layout
    sheet.given("job_gpus", layout.world, "", "GPUs of the job", f"layout {layout}")
    sheet.work_out("job_nodes", "ceil(job_gpus / gpus_per_node)", "", "nodes of the job")
    sheet.work_out("nodes_beside_job", "nodes - job_nodes", "", "nodes that are not part of the job")
    sheet.work_out(
        "further_jobs",
        "floor((nodes - spare_nodes) / job_nodes) - 1",
        "",
        "further jobs of this size that the other nodes could run",
    )
    sheet.given(
        "step_low_s", estimate.interval.low, "s", "step time, low end", "90% interval of the cost model"
    )
    sheet.given(
        "step_high_s", estimate.interval.high, "s", "step time, high end", "90% interval of the cost model"
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
        ("ettr_low", outcome.ettr_low, "1 in 20 simulated runs trains less than"),
        ("ettr_high", outcome.ettr_high, "1 in 20 simulated runs trains more than"),
        ("lost_share", outcome.lost, "share of time that repeats work lost in failures"),
        ("checkpoint_share", outcome.checkpoints, "share of time that checkpoints stop training"),
        ("restart_share", outcome.restarts, "share of time between a failure and the restart"),
        ("repair_share", outcome.no_spare, "share of time that waits for a repair"),
    ):
        sheet.given(name, share, "share", label, SIMULATED)
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
    sheet.work_out("goodput_tok_s", "training_tok_s * ettr_simulated", "tokens/s", "goodput")
    sheet.given("tokens", goal.tokens, "tokens", "tokens to train on", "asked for")
    sheet.work_out("days", "tokens / goodput_tok_s / 86400", "days", "run time")
    sheet.work_out("failures_in_run", "days * 86400 * ettr_simulated / mttf_s", "", "failures during the run")
    device, node = goal.cluster.device, goal.cluster.node
    sheet.given("device_w", device.power_w, "W", "power of a GPU", f"catalogue: {device.name}")
    sheet.given("node_w", node.power_w, "W", "power of the rest of a node", f"catalogue: {node.name}")
    sheet.given("switch_ports", goal.cluster.fabric.switch_ports, "", "ports of a switch", "catalogue")
    sheet.work_out("network_w", "switches * switch_ports * switch_w", "W", "power of the switches")
    sheet.work_out("machines_w", "gpus * device_w + nodes * node_w + network_w", "W", "power of all machines")
    sheet.work_out("facility_w", "machines_w * pue", "W", "power of the building")
    sheet.work_out(
        "energy_mwh", "facility_w * 1e12 / goodput_tok_s / 3.6e9", "MWh", "energy for a trillion tokens"
    )
    sheet.given(
        "price",
        device.price_per_hour,
        "USD/h",
        "price of a GPU",
        f"--price, or the catalogue's guide for {device.name}",
    )
    sheet.work_out(
        "cost_trillion", "gpus * price * 1e12 / goodput_tok_s / 3600", "USD", "price of a trillion tokens"
    )
    sheet.work_out("cost_run", "cost_trillion * tokens / 1e12", "USD", "price of the run")
