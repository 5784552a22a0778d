"""How full a cluster gets: tasks arrive in random order and stay, until 130% of its GPUs were asked for. This is
the experiment of the FGD paper (Weng et al., USENIX ATC 2023, section 6), with its packing rules and ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity
from cumulo.cluster.decide.packing import (
    Clustering,
    GradientDescent,
    Scorer,
    TaskMix,
    best_fit,
    dot_product,
    gpu_packing,
    kind_of,
    place_by_score,
    random_score,
    stranded,
    task_mix,
)  # fmt: skip

# GPU allocation in percent when tasks for 100% and for 130% of the GPUs have arrived, `openb` default trace, mean
# of 10 seeds: hkust-adsl/kubernetes-scheduler-simulator, experiments/analysis/expected_results.
PUBLISHED = {
    "random": (86.30, 87.47), "dot-product": (90.62, 90.85), "clustering": (91.65, 91.88),
    "gpu-packing": (91.78, 92.00), "best-fit": (92.86, 93.08), "fgd": (95.23, 95.39),
}  # fmt: skip


RULES = (*PUBLISHED, "lookahead")  # the last is ours


@dataclass(frozen=True, slots=True)
class Filling:
    """Percent of all GPUs allocated when so much was asked for, one value per seed."""

    policy: str
    at_100: tuple[float, ...]
    at_130: tuple[float, ...]


def _scorer(name: str, mix: TaskMix) -> Scorer:
    scorers: dict[str, Scorer] = {
        "random": random_score, "dot-product": dot_product, "clustering": Clustering(), "gpu-packing": gpu_packing,
        "best-fit": best_fit, "fgd": GradientDescent(mix), "lookahead": GradientDescent(mix, stranded),
    }  # fmt: skip
    return scorers[name]


def arrivals(jobs: Sequence[JobRequest], gpus: int, ratio: float, seed: int) -> list[JobRequest]:
    """All jobs in random order, then copies of random ones until `ratio` of the GPUs is asked for."""
    draw = np.random.default_rng(seed)
    order = [jobs[number] for number in draw.permutation(len(jobs)).tolist()]
    asked, copies = sum(job.milli_per_task for job in jobs), 0
    while True:
        job = jobs[int(draw.integers(len(jobs)))]
        if asked + job.milli_per_task > ratio * gpus * 1000:
            return order
        asked += job.milli_per_task
        order.append(replace(job, job_id=f"{job.job_id}-copy-{copies}"))
        copies += 1


def fill(
    nodes: Sequence[ClusterNode],
    jobs: Sequence[JobRequest],
    name: str,
    seeds: Sequence[int],
    ratio: float = 1.3,
) -> Filling:
    """`jobs` are of one task each. A job that does not fit when it arrives is turned away."""
    mix, gpus = task_mix(jobs), sum(node.gpus for node in nodes)
    curves = [
        _fill_once(nodes, arrivals(jobs, gpus, ratio, seed), name, _scorer(name, mix), seed) for seed in seeds
    ]
    at_100, at_130 = ([_at(curve, percent) for curve in curves] for percent in (100, round(100 * ratio)))
    return Filling(name, tuple(at_100), tuple(at_130))


def _fill_once(
    nodes: Sequence[ClusterNode], order: Sequence[JobRequest], name: str, scorer: Scorer, seed: int
) -> list[tuple[float, float]]:
    """(percent asked for, percent allocated) after each arrival."""
    free, gpus = FreeCapacity(nodes), sum(node.gpus for node in nodes)
    asked = used = 0
    curve = []
    for job in order:
        asked += job.milli_per_task
        place = place_by_score(job, free, scorer, seed, any_gpu=name == "random")
        if place is not None:
            free.allocate(job, [place])
            used += job.milli_per_task
            if isinstance(scorer, Clustering) and job.gpus_per_task:
                scorer.kinds.setdefault(place.node, set()).add(kind_of(job))
        curve.append((asked / gpus / 10, used / gpus / 10))
    return curve


def _at(curve: Sequence[tuple[float, float]], percent: int) -> float:
    """Allocation while the load rounds to this percent, as the published analysis takes it."""
    some = [used for asked, used in curve if round(asked) == percent]
    return sum(some) / len(some) if some else curve[-1][1]
