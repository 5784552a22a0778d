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
    given = {
        "replica_gpus": best.replica.ranks,
        "replica_rate": middle,
        "replica_rate_low": low,
        "replica_rate_high": high,
        "answer_tokens": best.output_tokens,
    }
    sheet.fill("inference replica", given, how=how)
    if goal.rate is not None:
        asked = {"inference_rate": goal.rate, "inference_replicas": best.replicas}
        sheet.fill("inference of a rate", asked, how=how)
    else:
        sheet.fill("inference of all nodes")
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
    answer = plan.capacity[1].best.report.e2e_s
    known = {"think": THINK_S, "answer_s": answer.mean if answer is not None else 0.0}
    sheet.fill("inference", known, how=how)
