"""The training job of a cluster plan: how many GPUs it takes, its layout and its figures. Called by the cluster
planner."""

import math

from cumulo.base.quantities import number, quantity
from cumulo.errors import ConfigError, CumuloError
from cumulo.plan.cluster.checkpoints import best_job_gpus
from cumulo.plan.cluster.goal import ClusterGoal, job_sizes
from cumulo.plan.cluster.sheet import Sheet
from cumulo.plan.search.search import Plan, search, timed
from cumulo.plan.search.why import refuse
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
