"""Synthetic workloads of other shapes than the usual one: `cumulo bench cluster --workload` measures decisions on
them, because a policy that is fast on one shape of queue may be slow on another. Shapes can be put together:
`tenants+burst` has a thousand tenants whose jobs wait at once. And when nodes fail: at random, at published rates.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.decide.jobs import SpeedTable
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.snapshot import TenantQuota
from cumulo.cluster.simulate.job_speed import TraceJob
from cumulo.cluster.simulate.traces import synthetic_trace, uniform_nodes
from cumulo.errors import ConfigError

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


NODES_PER_LEAF = 32
_TENANTS, _PRIORITIES, _DEVICES = 1000, 100, 8
_CORES_PER_GPU, _MIB_PER_GPU = 16_000, 128 * 1024  # thousandths of cores


@dataclass(frozen=True, kw_only=True)
class ClusterWorkload:
    """A cluster, the jobs that arrive there, and what else happens."""

    nodes: list[ClusterNode]
    trace: list[TraceJob]
    quotas: tuple[TenantQuota, ...] = ()
    failures: FailureRates | None = None


@dataclass(frozen=True, kw_only=True)
class WorkloadSize:
    nodes: int
    jobs: int
    load: float
    gpus_per_node: int = 8
    seed: int = 0
    steps: bool = False  # gangs exchange data in every step
    elastic: bool = False  # every job may have any number of GPUs up to four times what it asks for


def check_name(name: str) -> None:
    for part in name.split("+"):
        if part not in WORKLOADS:
            raise ConfigError(f"there is no workload {part!r}{did_you_mean(part, WORKLOADS)}")


def workload_named(name: str, size: WorkloadSize) -> ClusterWorkload:
    check_name(name)
    gpus = size.nodes * size.gpus_per_node
    trace = synthetic_trace(size.jobs, gpus, size.load, size.seed, size.gpus_per_node, size.steps)
    trace = [  # every tenth job is urgent, so that preemption has something to do
        job if size.elastic else _asking(job, priority=int(number % 10 == 0))
        for number, job in enumerate(trace)
    ]
    found = ClusterWorkload(nodes=uniform_nodes(size.nodes, size.gpus_per_node, NODES_PER_LEAF), trace=trace)
    for part in name.split("+"):
        found = WORKLOADS[part](found, random.Random(f"{part} {size.seed}"))
    if size.elastic:
        elastic = [_elastic(job, number, size.gpus_per_node) for number, job in enumerate(found.trace)]
        found = replace(found, trace=elastic)
    return found


def _asking(job: TraceJob, **changes: object) -> TraceJob:
    return replace(job, request=replace(job.request, **changes))  # type: ignore[arg-type]


def _elastic(job: TraceJob, number: int, node_gpus: int) -> TraceJob:
    """Any number of GPUs up to four times what it asks for; shares of a GPU cannot be resized."""
    if job.request.fractional or job.request.cpu_milli:
        return job
    asked = int(job.request.gpus)
    return _asking(
        job, tasks=asked, gpus_per_task=1, min_tasks=1, max_tasks=4 * asked,
        speed=_table(number % 5, 4 * asked, node_gpus),
    )  # fmt: skip


@cache
def _table(kind: int, most: int, node_gpus: int) -> SpeedTable:
    """Some jobs scale better than others; beyond a node all scale worse."""
    loss = 0.02 * (kind + 1)
    inside = tuple(size / (1 + loss * (size - 1)) for size in range(1, node_gpus + 1))
    return SpeedTable(inside, tuple(0.8 * size / (1 + loss * (size - 1)) for size in range(1, most + 1)))


def _usual(usual: ClusterWorkload, draw: random.Random) -> ClusterWorkload:
    return usual


def _shares(usual: ClusterWorkload, draw: random.Random) -> ClusterWorkload:
    """Three of four jobs of one GPU ask for a share of it."""

    def asking(job: TraceJob) -> TraceJob:
        if job.request.gpus == 1 and draw.random() < 0.75:
            return _asking(job, gpu_milli=draw.choice((100, 200, 250, 300, 500, 600, 750)))
        return job

    return replace(usual, trace=[asking(job) for job in usual.trace])


def _cores(usual: ClusterWorkload, draw: random.Random) -> ClusterWorkload:
    """Every task asks for cores and memory, some for more than their GPUs' share of a node, some for no GPU."""
    nodes = [
        replace(node, cpu_milli=node.gpus * _CORES_PER_GPU, memory_mib=node.gpus * _MIB_PER_GPU)
        for node in usual.nodes
    ]

    def asking(job: TraceJob) -> TraceJob:
        many, request = draw.choice((0.25, 0.5, 0.5, 1.0, 1.0, 1.5)), job.request
        gpus = request.gpus_per_task
        if gpus == 1 and draw.random() < 0.1:
            return _asking(job, gpus_per_task=0, cpu_milli=4000, memory_mib=16 * 1024)
        return _asking(
            job,
            cpu_milli=min(int(many * gpus * _CORES_PER_GPU), nodes[0].cpu_milli),
            memory_mib=min(int(many * gpus * _MIB_PER_GPU), nodes[0].memory_mib),
        )

    return replace(usual, nodes=nodes, trace=[asking(job) for job in usual.trace])


def _devices(usual: ClusterWorkload, draw: random.Random) -> ClusterWorkload:
    """Nodes of eight kinds; half of the jobs accept one to three of them."""
    names = [f"device-{number}" for number in range(_DEVICES)]
    nodes = [replace(node, device=names[number % _DEVICES]) for number, node in enumerate(usual.nodes)]

    def asking(job: TraceJob) -> TraceJob:
        if draw.random() < 0.5:
            return job
        return _asking(job, devices=tuple(sorted(draw.sample(names, draw.randint(1, 3)))))

    return replace(usual, nodes=nodes, trace=[asking(job) for job in usual.trace])


def _tenants(usual: ClusterWorkload, draw: random.Random) -> ClusterWorkload:
    """A thousand tenants with quotas that add up to the cluster; each may borrow the same and a gang more."""
    gpus = sum(node.gpus for node in usual.nodes)
    quotas = tuple(
        TenantQuota(f"tenant-{number}", gpus / _TENANTS, gpus / _TENANTS + 256, draw.choice((1.0, 1.0, 2.0)))
        for number in range(_TENANTS)
    )
    # A few tenants have most of the jobs.
    weights = [1 / (number + 1) for number in range(_TENANTS)]
    chosen = draw.choices(range(_TENANTS), weights, k=len(usual.trace))
    trace = [_asking(job, tenant=f"tenant-{tenant}") for job, tenant in zip(usual.trace, chosen, strict=True)]
    return replace(usual, trace=trace, quotas=quotas)


def _priorities(usual: ClusterWorkload, draw: random.Random) -> ClusterWorkload:
    """A hundred priorities."""
    return replace(usual, trace=[_asking(job, priority=draw.randrange(_PRIORITIES)) for job in usual.trace])


def _burst(usual: ClusterWorkload, draw: random.Random) -> ClusterWorkload:
    """All jobs arrive in the first hundredth of the time, so that nearly all of them wait together."""
    return replace(usual, trace=[_asking(job, arrival_s=job.request.arrival_s / 100) for job in usual.trace])


def _wide(usual: ClusterWorkload, draw: random.Random) -> ClusterWorkload:
    """Every thousandth job is a gang on a twentieth of all nodes: 512 of 10,240."""
    tasks = max(1, len(usual.nodes) // 20)
    return replace(
        usual,
        trace=[
            _asking(job, tasks=tasks, gpus_per_task=usual.nodes[0].gpus) if number % 1000 == 500 else job
            for number, job in enumerate(usual.trace)
        ],
    )


def _unpredicted(usual: ClusterWorkload, draw: random.Random) -> ClusterWorkload:
    """Nobody knows how long a third of the jobs run."""
    return replace(
        usual, trace=[_asking(job, predicted_s=None) if draw.random() < 1 / 3 else job for job in usual.trace]
    )


def _failures(usual: ClusterWorkload, draw: random.Random) -> ClusterWorkload:
    """Nodes fail at the rate of RSC-1, half of the failures on a hundredth of the nodes."""
    return replace(usual, failures=FailureRates(PUBLISHED_RATES["rsc-1"], bad_nodes=0.01, bad_share=0.5))


WORKLOADS: dict[str, Callable[[ClusterWorkload, random.Random], ClusterWorkload]] = {
    "usual": _usual, "shares": _shares, "cores": _cores, "devices": _devices, "tenants": _tenants,
    "priorities": _priorities, "burst": _burst, "wide": _wide, "unpredicted": _unpredicted,
    "failures": _failures,
}  # fmt: skip
