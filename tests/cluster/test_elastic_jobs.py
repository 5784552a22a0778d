"""Elastic jobs: sizes within the limits of tenants, and decisions that are bounded however many jobs there are."""

from collections import Counter

import numpy as np
import pytest

from cumulo.cluster.decide.decisions import Decision, Eviction, JobPlacement, Resize, Unfinished, Waits
from cumulo.cluster.decide.elastic_jobs import columns, limits, policy
from cumulo.cluster.decide.elastic_jobs.prices import Prices, price_brackets
from cumulo.cluster.decide.elastic_jobs.sizes import (
    TenantLimits,
    choose_sizes,
    possible_sizes,
    size_groups,
)
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, SpeedTable, TaskPlace
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decide.policy import las
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota, snapshot_of
from cumulo.cluster.simulate.elastic_speed import ElasticSpeed
from cumulo.cluster.simulate.job_speed import TraceJob
from cumulo.cluster.simulate.play import BrokenPolicy, PlayOptions, play
from cumulo.cluster.simulate.traces import uniform_nodes
from cumulo.cluster.simulate.workloads import WorkloadSize, workload_named

ELASTIC = ("elastic", "goodput", "attained")
TABLE = SpeedTable(
    tuple(size / (1 + 0.05 * size) for size in range(1, 9)), tuple(0.8 * size for size in range(1, 17))
)


def waiting_job(name: str, **more: object) -> JobRequest:
    return JobRequest(name, min_tasks=1, max_tasks=16, speed=TABLE, predicted_s=600.0, **more)  # type: ignore[arg-type]


def random_costs(draw: np.random.Generator, jobs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    most = draw.choice([1, 4, 8, 16, 32, 64], jobs)
    options = possible_sizes(8, most, np.zeros(jobs, dtype=np.int64))
    if draw.random() < 0.5:
        costs = np.sort(draw.random((jobs, len(options))), axis=1)[:, ::-1].copy()
    else:
        speed = options / (1 + draw.uniform(0.02, 0.2, (jobs, 1)) * options)
        costs = draw.uniform(0.5, 2, (jobs, 1)) / (speed * draw.uniform(0.05, 1, (jobs, 1)) + 1e-3)
    costs[options > most[:, None]] = np.inf
    return most, options, costs


def test_sizes_near_the_last_prices_are_those_without_any_and_keep_to_every_limit():
    draw, limited = np.random.default_rng(1), 0
    for _ in range(200):
        jobs, tenants = int(draw.integers(1, 60)), int(draw.integers(1, 6))
        most, options, costs = random_costs(draw, jobs)
        groups = [(rows, costs[rows, :width]) for rows, width in size_groups(options, most)]
        gpus = int(draw.integers(1, int(most.sum()) + 9))
        tenant, room = draw.integers(0, tenants, jobs), draw.integers(0, 60, tenants)
        within = TenantLimits(tenant, room) if draw.random() < 0.75 else None
        sizes = choose_sizes(groups, options, gpus, within)
        assert sizes.sum() <= gpus
        assert within is None or (np.bincount(tenant, sizes, tenants) <= room).all()
        limited += within is not None and bool((sizes == 0).any())
        prices = Prices()
        for _ in range(3):
            assert choose_sizes(groups, options, gpus, within, prices).tolist() == sizes.tolist()
            prices.of_all *= draw.choice([0.01, 0.9, 1.0, 1.1, 50.0])
            prices.of_tenant = prices.of_tenant * draw.choice(
                [0.0, 0.01, 0.9, 1.1, 50.0], len(prices.of_tenant)
            )
    assert limited > 50


def test_prices_lie_close_around_where_what_is_wanted_begins_to_fit():
    draw = np.random.default_rng(3)
    for _ in range(50):
        worth = draw.lognormal(0.0, 5.0, (8, 30))  # what each GPU is worth to each of eight tenants
        room, least = draw.integers(0, 30, 8), np.full(8, 1e-9)
        guess = draw.choice([0.0, 1.0], 8) * draw.lognormal(0.0, 5.0, 8)

        def wanted(price: np.ndarray, which: np.ndarray, worth: np.ndarray = worth) -> np.ndarray:
            return np.where(which, (worth > price[:, None]).sum(axis=1), 0)

        everybody = np.ones(8, dtype=np.bool_)
        for _ in range(6):  # the first guess may be far away
            low, high = price_brackets(wanted, room, guess, least)
            assert (wanted(low, everybody) > room).all() and (wanted(high, everybody) <= room).all()
            guess = np.where(high < 1e29, high, 2 * low)
        assert (high <= 1.11 * low).mean() > 0.9


def test_limits_that_bind_nobody_change_no_size():
    draw = np.random.default_rng(2)
    for _ in range(100):
        jobs = int(draw.integers(1, 40))
        most, options, costs = random_costs(draw, jobs)
        groups = [(rows, costs[rows, :width]) for rows, width in size_groups(options, most)]
        gpus = int(draw.integers(1, int(most.sum()) + 9))
        loose = TenantLimits(draw.integers(0, 3, jobs), np.full(3, 10_000))
        assert (
            choose_sizes(groups, options, gpus, loose).tolist()
            == choose_sizes(groups, options, gpus).tolist()
        )


@pytest.mark.parametrize("name", ELASTIC)
def test_the_jobs_of_a_tenant_share_its_limit(name):
    """The cluster has room for all of them to be large: the tenant has not."""
    waiting = [waiting_job(f"j{number}", tenant="small") for number in range(12)]
    snapshot = snapshot_of(60.0, uniform_nodes(20, 8), waiting, [], [TenantQuota("small", 8.0)])
    decided = policy_named(name).decide(snapshot)
    started = [one for one in decided if isinstance(one, JobPlacement)]
    assert [len(one.places) for one in started] == [1] * 8
    told = {one.reason for one in decided if isinstance(one, Waits)}
    assert told == {"tenant small has 8 GPUs, its limit is 8"}


def burst(nodes: int = 20, jobs: int = 200):
    return workload_named("burst", WorkloadSize(nodes=nodes, jobs=jobs, load=2.0, seed=3, elastic=True))


def played(name: str, workload, seen: list[list[Decision]]):
    named = policy_named(name)

    def decide(snapshot: Snapshot) -> list[Decision]:
        seen.append(named.decide(snapshot))
        return seen[-1]

    options = PlayOptions(interval_s=60.0, always_decide=True, quotas=workload.quotas)
    return play(workload.nodes, workload.trace, decide, ElasticSpeed(), options)


@pytest.mark.parametrize("name", ELASTIC)
def test_a_burst_is_decided_in_parts_and_no_job_is_much_later(name, monkeypatch):
    workload = burst()
    whole = played(name, workload, [])
    monkeypatch.setattr(policy, "_MOST_JOBS", 48)
    monkeypatch.setattr(policy, "_MOST_CHANGES", 20)
    monkeypatch.setattr(limits, "_MORE", 8)
    monkeypatch.setattr(columns, "_MOST_READ", 32)
    seen: list[list[Decision]] = []
    parted = played(name, workload, seen)
    assert max(sum(isinstance(one, JobPlacement | Resize | Eviction) for one in some) for some in seen) == 20
    assert sum(isinstance(some[-1], Unfinished) for some in seen if some) > 20
    assert len(parted.outcomes) == len(whole.outcomes) == len(workload.trace)
    assert parted.mean_jct_s < 1.1 * whole.mean_jct_s


def test_parts_keep_to_the_limits_of_tenants(monkeypatch):
    monkeypatch.setattr(policy, "_MOST_JOBS", 32)
    monkeypatch.setattr(policy, "_MOST_CHANGES", 10)
    size = WorkloadSize(nodes=30, jobs=300, load=2.0, seed=3, elastic=True)
    workload = workload_named("tenants", size)
    run = played("elastic", workload, [])  # what breaks a quota is refused
    assert len(run.outcomes) == len(workload.trace)


def test_a_policy_that_never_finishes_is_named():
    with pytest.raises(BrokenPolicy, match="unfinished"):
        play(uniform_nodes(1, 1), burst(2, 10).trace, lambda snapshot: [Unfinished()])


def test_las_preempts_nobody_for_a_job_that_its_tenants_limit_refuses():
    nodes = uniform_nodes(1, 8)
    places = tuple(TaskPlace(nodes[0].name, (gpu,)) for gpu in range(8))
    old = JobRequest("old", tasks=4, tenant="other", attained_gpu_s=1e6)
    small = JobRequest("small", tasks=4, tenant="full")
    running = [RunningJob(old, places[:4]), RunningJob(small, places[4:])]
    waiting = [JobRequest(f"more{number}", tasks=4, tenant="full", arrival_s=1.0) for number in range(3)]
    quotas = [TenantQuota("full", 4.0), TenantQuota("other", 8.0)]
    decided = policy_named("las").decide(snapshot_of(60.0, nodes, waiting, running, quotas))
    assert decided == [Waits("more0", "tenant full has 4 GPUs, its limit is 4")]
    free_to_start = policy_named("las").decide(snapshot_of(60.0, nodes, waiting, running))
    assert Counter(type(one) for one in free_to_start) == {Eviction: 1, JobPlacement: 1}


def test_las_starts_a_burst_in_parts_and_starts_the_same_jobs(monkeypatch):
    size = WorkloadSize(nodes=20, jobs=200, load=2.0, seed=3)
    workload = workload_named("burst", size)
    options = PlayOptions(interval_s=60.0, keep_log=True)
    whole = play(workload.nodes, workload.trace, policy_named("las").decide, options=options)
    monkeypatch.setattr(las, "_MOST_STARTS", 10)
    parted = play(workload.nodes, workload.trace, policy_named("las").decide, options=options)
    assert parted.decisions > whole.decisions
    # Also where the first ones find no place.
    assert max(sum(isinstance(one, JobPlacement) for one in decided) for _, decided in parted.log) == 10
    assert parted.mean_jct_s == pytest.approx(whole.mean_jct_s, rel=0.02)


def test_attained_does_not_let_jobs_take_turns_at_every_decision():
    """Twelve equal jobs on eight GPUs: those that wait have had less GPU time a minute later."""
    jobs = [
        TraceJob(JobRequest(f"j{number}", min_tasks=1, max_tasks=1, speed=TABLE, checkpoint_s=30.0), 3600.0)
        for number in range(12)
    ]
    options = PlayOptions(interval_s=60.0, always_decide=True)
    run = play(uniform_nodes(1, 8), jobs, policy_named("attained").decide, ElasticSpeed(), options)
    assert len(run.outcomes) == 12
    assert 4 <= run.evictions <= 24


@pytest.mark.parametrize("name", ELASTIC)
def test_no_job_is_restarted_to_have_as_many_gpus_as_before(name):
    """Many want to grow, and few find room."""
    workload, named, sizes = burst(), policy_named(name), list[tuple[int, int]]()

    def decide(snapshot: Snapshot) -> list[Decision]:
        decided = named.decide(snapshot)
        sizes.extend(
            (len(snapshot.running[one.job_id].places), len(one.places))
            for one in decided
            if isinstance(one, Resize)
        )
        return decided

    play(
        workload.nodes,
        workload.trace,
        decide,
        ElasticSpeed(),
        PlayOptions(interval_s=60.0, always_decide=True),
    )
    assert len(sizes) > 100 and all(before != after for before, after in sizes)
