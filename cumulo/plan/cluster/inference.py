"""Inference beside training: what the nodes that a job leaves serve, through `plan serve`. Called by the cluster
planner and its command."""

from dataclasses import dataclass

from cumulo.errors import ConfigError
from cumulo.plan.cluster.sheet import Sheet
from cumulo.plan.serve.kinds import ReplicaChoices, kinds
from cumulo.plan.serve.search import ServePlan, Wanted, search
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.catalog import Catalog
from cumulo.spec.model import ModelSpec
from cumulo.spec.slo import Slo

_MANY = 8  # replicas: so many that the cheapest kind is the one that takes most for its price
THINK_S = 30.0  # between an answer and the next question


@dataclass(frozen=True, slots=True)
class InferenceGoal:
    model_name: str
    model: ModelSpec
    traffic: Traffic
    slo: Slo
    rate: float | None = None  # requests/s of all replicas; None: as many as the nodes that are left take
    hypothetical: bool = False


def inference_plan(goal: InferenceGoal, device: str, catalog: Catalog) -> ServePlan:
    """A plan of as much traffic as is asked for; or of so much that replicas are chosen for what they take."""
    weights = ("bfloat16", "float8", "int4") + (("float4",) if goal.hypothetical else ())
    choices = ReplicaChoices((device,), weights, split=False, hypothetical=goal.hypothetical)
    every = list(kinds(goal.model, goal.traffic, goal.slo, catalog, choices))
    most = max((one.most_rate for one in every), default=0.0)
    rate = goal.rate if goal.rate is not None else _MANY * most or 1.0
    return search(Wanted(goal.model, goal.traffic, rate, goal.slo), every)


def inference_sheet(sheet: Sheet, goal: InferenceGoal, plan: ServePlan) -> None:
    best = plan.best
    low, middle, high = (one.rate for one in plan.capacity)
    how = f"cumulo plan serve: {best.replica}, {goal.slo}"
    sheet.given("replica_gpus", best.replica.ranks, "GPUs", "inference: GPUs of a replica", how)
    sheet.given("replica_rate", middle, "requests/s", "inference: most that a replica takes", how)
    sheet.given("replica_rate_low", low, "requests/s", "inference: the same, low end", how)
    sheet.given("replica_rate_high", high, "requests/s", "inference: the same, high end", how)
    sheet.given(
        "answer_tokens", best.output_tokens, "tokens", "inference: tokens of an answer", "the traffic"
    )
    if goal.rate is not None:
        sheet.given("inference_rate", goal.rate, "requests/s", "inference: request rate", "--rate")
        sheet.given(
            "inference_replicas",
            best.replicas,
            "replicas",
            "inference: replicas",
            f"{how}, at the pessimistic end",
        )
        sheet.work_out(
            "inference_nodes",
            "ceil(inference_replicas * replica_gpus / gpus_per_node)",
            "nodes",
            "inference: nodes",
        )
    else:
        sheet.work_out(
            "inference_nodes",
            "nodes - spare_nodes - job_nodes",
            "nodes",
            "inference: nodes",
            "all that are left",
        )
        sheet.work_out(
            "inference_replicas",
            "floor(inference_nodes * gpus_per_node / replica_gpus)",
            "replicas",
            "inference: replicas",
        )
        sheet.work_out(
            "inference_rate",
            "inference_replicas * replica_rate_low",
            "requests/s",
            "inference: request rate that surely fits",
            "at the pessimistic end of the predicted step times",
        )
    if sheet["inference_nodes"] > sheet["nodes"] - sheet["spare_nodes"] - sheet["job_nodes"]:
        left = int(sheet["nodes"] - sheet["spare_nodes"] - sheet["job_nodes"])
        raise ConfigError(
            f"inference needs {int(sheet['inference_nodes']):,} nodes ({how}), and beside the job and its spares "
            f"there are {left:,}: lower --rate, or give the job fewer GPUs with --fixed"
        )
    if sheet["inference_nodes"] < 1:
        raise ConfigError(
            "no node is left for inference; give the job fewer GPUs with --fixed, or raise --gpus"
        )
    sheet.work_out(
        "inference_tok_s", "inference_rate * answer_tokens", "tokens/s", "inference: output throughput"
    )
    rates = "inference_replicas * replica_rate"
    sheet.work_out("inference_most", rates, "requests/s", "inference: expected limit")
    sheet.work_out("inference_most_low", f"{rates}_low", "requests/s", "inference: the same, low end")
    sheet.work_out("inference_most_high", f"{rates}_high", "requests/s", "inference: the same, high end")
    answer = plan.capacity[1].best.report.e2e_s
    sheet.given("think", THINK_S, "s", "inference: time between an answer and the next question", "assumed")
    sheet.given(
        "answer_s", answer.mean if answer is not None else 0.0, "s", "inference: time of an answer", how
    )
    sheet.work_out(
        "users", "inference_rate * (think + answer_s)", "users", "inference: concurrent users", "Little's law"
    )
    for end in ("low", "high"):
        formula = f"inference_most_{end} * (think + answer_s)"
        sheet.work_out(f"users_{end}", formula, "users", f"inference: users, {end} end")
    sheet.work_out(
        "inference_price",
        "inference_nodes * gpus_per_node * price / (inference_tok_s * 3600) * 1e6",
        "USD/M tokens",
        "inference: price of output tokens",
    )
