"""Other mixes of tasks from one trace: more shares of GPUs, more tasks of several GPUs, more tasks without GPUs,
more tasks that ask for a device. The FGD paper varies its trace in these ways (Weng et al., USENIX ATC 2023); a
packing rule that was chosen on one mix is judged on the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.errors import ConfigError


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
