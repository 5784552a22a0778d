"""How full a cluster gets: tasks arrive in random order and stay, until 130% of its GPUs were asked for. This is
the experiment of the FGD paper (Weng et al., USENIX ATC 2023, section 6), with its packing rules and ours.

`variant` draws other mixes of tasks from one trace: more shares of GPUs, more tasks of several GPUs, more
tasks without GPUs, more tasks that ask for a device, as the paper does. A packing rule that was chosen on one
mix is judged on the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.decide.decisions import JobPlacement
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
    packing_policy,
    random_score,
    stranded,
    task_mix,
)  # fmt: skip
from cumulo.cluster.decide.snapshot import Snapshot
from cumulo.errors import ConfigError

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

    @property
    def mean_at_100(self) -> float:
        return sum(self.at_100) / len(self.at_100)

    @property
    def mean_at_130(self) -> float:
        return sum(self.at_130) / len(self.at_130)


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
    rule = packing_policy(scorer, name, seed, any_gpu=name == "random")
    free, gpus = FreeCapacity(nodes), sum(node.gpus for node in nodes)
    asked = used = 0
    curve = []
    for job in order:
        asked += job.milli_per_task
        for decision in rule(Snapshot(0.0, nodes, [job], {}, free)):
            if isinstance(decision, JobPlacement):
                free.allocate(job, decision.places)
                used += job.milli_per_task
                if isinstance(scorer, Clustering) and job.gpus_per_task:
                    scorer.kinds.setdefault(decision.places[0].node, set()).add(kind_of(job))
        curve.append((asked / gpus / 10, used / gpus / 10))
    return curve


def _at(curve: Sequence[tuple[float, float]], percent: int) -> float:
    """Allocation while the load rounds to this percent, as the published analysis takes it."""
    some = [used for asked, used in curve if round(asked) == percent]
    return sum(some) / len(some) if some else curve[-1][1]


def _weight(job: JobRequest) -> float:
    return float(job.milli_per_task)


def _one(job: JobRequest) -> float:
    return 1.0


# What is raised or lowered to a share of the whole, and what the share is counted in.
_KINDS: dict[str, tuple[Callable[[JobRequest], bool], Callable[[JobRequest], float]]] = {
    "shares": (lambda job: job.fractional, _weight),
    "multi-gpu": (lambda job: job.gpus_per_task > 1, _weight),
    "cpu": (lambda job: job.gpus_per_task == 0, _one),
}


def variant(
    jobs: Sequence[JobRequest], nodes: Sequence[ClusterNode], wanted: str, seed: int = 0
) -> list[JobRequest]:
    """`shares=0.6`: 60% of the GPUs asked for are asked for in shares. `multi-gpu=0.5`: half of them by tasks of
    several GPUs. `cpu=0.4`: 40% of the tasks have no GPU. `device=0.3`: 30% of the GPU tasks ask for a device. As
    many tasks as before, drawn from the trace again."""
    kind, _, text = wanted.partition("=")
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(
            f"--mix {wanted}: write KIND=SHARE with a share of 0 to 1, for example multi-gpu=0.5"
        )
    draw = np.random.default_rng(seed)
    if kind == "device":
        return _asking_for_devices(jobs, nodes, share, draw)
    if kind not in _KINDS:
        known = [*_KINDS, "device"]
        raise ConfigError(f"--mix {wanted}: there is no kind {kind!r}{did_you_mean(kind, known)}")
    belongs, size = _KINDS[kind]
    inside = np.array([belongs(job) for job in jobs])
    sizes = np.array([size(job) for job in jobs])
    here, there = float(sizes[inside].sum()), float(sizes[~inside].sum())
    if not here or not there:
        raise ConfigError(f"--mix {wanted}: the trace has only tasks of one kind")
    chance = np.where(inside, share / here, (1 - share) / there)
    if kind != "cpu":  # tasks without GPUs stay as frequent as they were, next to those with GPUs
        without = sizes == 0
        chance[without] = 0.0
        chance[without] = (
            float(without.mean()) / max(1, without.sum()) / (1 - float(without.mean())) * chance.sum()
        )
    numbers = draw.choice(len(jobs), len(jobs), p=chance / chance.sum())
    return [
        replace(jobs[number], job_id=f"{jobs[number].job_id}-{at}")
        for at, number in enumerate(numbers.tolist())
    ]


def _asking_for_devices(
    jobs: Sequence[JobRequest], nodes: Sequence[ClusterNode], share: float, draw: np.random.Generator
) -> list[JobRequest]:
    """Devices as frequent as their GPUs, among nodes that could take the task."""
    found = []
    for job in jobs:
        if job.gpus_per_task and draw.random() < share:
            able = [
                node for node in nodes if node.gpus >= job.gpus_per_task and node.cpu_milli >= job.cpu_milli
            ]
            weights = np.array([node.gpus for node in able], dtype=np.float64)
            device = able[int(draw.choice(len(able), p=weights / weights.sum()))].device
            job = replace(job, devices=(device,))
        found.append(job)
    return found
