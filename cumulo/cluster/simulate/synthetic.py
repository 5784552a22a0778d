"""Clusters, jobs and failures that are drawn at random, for `cumulo simulate cluster --synthetic` and `--failures`;
and predictions made wrong at random, for `--prediction-error`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cumulo.cluster.decide.jobs import JobRequest, StepProfile
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.simulate.job_speed import TraceJob

# Failures per 1,000 node-days. RSC-1 and RSC-2: Kokolis et al., HPCA 2025 (arXiv 2410.21680); Llama 3 405B: 419
# in 54 days on 2,048 nodes (arXiv 2407.21783, table 5).
PUBLISHED_RATES = {"rsc-1": 6.5, "rsc-2": 2.34, "llama-3": 3.79}


@dataclass(frozen=True, slots=True)
class FailureRates:
    per_1000_node_days: float
    repair_s: float = 4 * 3600.0
    # Some nodes fail again and again: this share of them takes this share of all failures.
    bad_nodes: float = 0.0
    bad_share: float = 0.0


def failure_times(rates: FailureRates, nodes: int, until_s: float, seed: int) -> list[tuple[float, int]]:
    """(second, node), in order: a Poisson process over all nodes."""
    draw = random.Random(f"failures {seed}")
    mean_gap_s = (
        86_400_000.0 / (rates.per_1000_node_days * nodes) if rates.per_1000_node_days > 0 else float("inf")
    )
    bad = max(1, round(rates.bad_nodes * nodes)) if rates.bad_nodes else 0
    found: list[tuple[float, int]] = []
    at_s = draw.expovariate(1 / mean_gap_s)
    while at_s < until_s:
        among = bad if bad and draw.random() < rates.bad_share else nodes
        found.append((at_s, draw.randrange(among)))
        at_s += draw.expovariate(1 / mean_gap_s)
    return found


def uniform_nodes(
    nodes: int, gpus: int = 8, nodes_per_leaf: int = 0, device: str = "", oversubscription: float = 2.0
) -> list[ClusterNode]:
    """Equal nodes, so many to a leaf switch (0: one leaf). Consecutive numbers are under different leaves: a name
    says nothing about where a node hangs, so that packing by name is really blind."""
    leaves = -(-nodes // nodes_per_leaf) if nodes_per_leaf else 1
    return [
        ClusterNode(
            f"node-{number}",
            gpus,
            device,
            leaf=f"leaf-{number % leaves}",
            leaf_oversubscription=oversubscription,
        )
        for number in range(nodes)
    ]


def synthetic_trace(
    jobs: int, gpus: int, load: float = 0.9, seed: int = 0, gpus_per_node: int = 8, steps: bool = False
) -> list[TraceJob]:
    """Jobs as production clusters see them: most ask for one GPU and end within minutes, few ask for hundreds and
    run for days (the shares of Helios, Hu et al., SC 2021). `load`: GPU time asked for over GPU time there is.
    `steps`: jobs of several tasks exchange gradients, and some tokens of experts, in every step."""
    draw = random.Random(f"synthetic {seed}")
    sizes, weights = (1, 2, 4, 8, 16, 32, 64, 128, 256), (58, 12, 8, 14, 4, 2, 1.2, 0.6, 0.2)
    found: list[tuple[int, float, int]] = []
    for _ in range(jobs):
        size = draw.choices(sizes, weights)[0]
        seconds = min(86400.0, draw.lognormvariate(6.8 + 0.2 * size**0.4, 1.5))
        found.append((min(size, max(1, gpus // 4)), max(10.0, seconds), draw.randrange(16)))
    span_s = sum(size * seconds for size, seconds, _ in found) / (gpus * load)
    at_s = 0.0
    trace = []
    for number, (size, seconds, tenant) in enumerate(found):
        at_s += draw.expovariate(jobs / span_s)
        per_task = min(size, gpus_per_node)
        request = JobRequest(
            f"job-{number}", size // per_task, per_task, tenant=f"tenant-{tenant}", arrival_s=at_s,
            predicted_s=seconds * draw.lognormvariate(0, 0.3), checkpoint_s=120.0,
        )  # fmt: skip
        if steps and request.tasks > 1:
            request = replace(request, step=_drawn_step(f"step {seed} {number}"))
        trace.append(TraceJob(request, seconds))
    return trace


def _drawn_step(seed: str) -> StepProfile:
    draw = random.Random(seed)
    return StepProfile(
        draw.uniform(0.2, 1.5),
        1e9 * draw.choice((1, 2, 4, 8, 16)),
        1e9 * draw.choice((0, 0, 0, 1, 4)),
    )


def error_of(job_id: str, sigma: float) -> float:
    """By what factor this job's prediction is wrong: log-normal, always the same for one job."""
    return random.Random(f"error of {job_id}").lognormvariate(0.0, sigma) if sigma else 1.0


def mispredicted(trace: Sequence[TraceJob], sigma: float) -> list[TraceJob]:
    """The same jobs, with predictions that are wrong by random factors."""
    return [
        job if job.request.predicted_s is None
        else replace(job, request=replace(
            job.request, predicted_s=job.request.predicted_s * error_of(job.request.job_id, sigma)))
        for job in trace
    ]  # fmt: skip
