"""What policies are built from, against plain definitions: where gangs fit, when they fit, whose turn it is, and
how large elastic jobs become."""

import random
from collections import Counter

import numpy as np
import pytest

from cumulo.cluster.decide.elastic import choose_sizes, possible_sizes
from cumulo.cluster.decide.fit import emptiest_first, pack_gang, slots, tasks_that_fit
from cumulo.cluster.decide.jobs import WHOLE_GPU, JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity
from cumulo.cluster.decide.queueing import by_share, reserve
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota, snapshot_of
from cumulo.cluster.simulate.synthetic import uniform_nodes


def some_job(draw: random.Random, name: str) -> JobRequest:
    share = draw.random() < 0.2
    return JobRequest(
        name, draw.choice((1, 1, 2, 3, 7)), 1 if share else draw.choice((0, 1, 2, 3, 4)), 250 if share else 1000,
        draw.choice((0, 0, 500, 2000)), draw.choice((0, 0, 300)), devices=draw.choice(((), (), ("a",))),
        tenant=draw.choice("xyz"),
    )  # fmt: skip


def busy_clusters(seed: int, count: int):
    """Clusters on which jobs run, some with unknown ends."""
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        nodes = [
            ClusterNode(
                f"n{at}", draw.choice((2, 4)), draw.choice("ab"), 8000, 4000,
                health=draw.choice(("ready",) * 5 + ("down",)),
            )
            for at in range(6)
        ]  # fmt: skip
        free, running = FreeCapacity(nodes), list[RunningJob]()
        for at in range(20):
            job = some_job(draw, f"r{at}")
            if (places := pack_gang(job, free)) is not None:
                free.allocate(job, places)
                running.append(RunningJob(job, places, 0.0, draw.choice((None, float(at), 7.0, 99.0))))
        yield draw, snapshot_of(10.0, nodes, (), running)


def tasks_on(job: JobRequest, free: FreeCapacity, node: int) -> int:
    """One task after another, GPU by GPU."""
    if not free.ready[node] or (job.devices and free.nodes[node].device not in job.devices):
        return 0
    shares, cpu, memory = (
        free.gpu_milli[node].tolist(),
        int(free.cpu_milli[node]),
        int(free.memory_mib[node]),
    )
    found = 0
    while found < (99 if job.gpus_per_task else job.tasks):
        able = [gpu for gpu, share in enumerate(shares) if share >= job.gpu_milli][: job.gpus_per_task]
        if len(able) < job.gpus_per_task or cpu < job.cpu_milli or memory < job.memory_mib:
            break
        for gpu in able:
            shares[gpu] -= job.gpu_milli
        cpu, memory, found = cpu - job.cpu_milli, memory - job.memory_mib, found + 1
    return found


def test_tasks_that_fit_are_those_that_can_be_placed_one_after_another():
    seen = Counter()
    for draw, snapshot in busy_clusters(1, 60):
        for number in range(8):
            job, free = some_job(draw, f"j{number}"), snapshot.free
            fits = tasks_that_fit(job, free)
            assert fits.tolist() == [tasks_on(job, free, node) for node in range(len(free.nodes))]
            assert tasks_that_fit(job, free, [2, 0]).tolist() == [fits[2], fits[0]]
            for place in (pack_gang, emptiest_first):
                places = place(job, free)
                assert (places is None) == (fits.sum() < job.tasks)
                if places is not None:
                    on = Counter(free.index[one.node] for one in places)
                    assert sum(on.values()) == job.tasks
                    assert all(count <= fits[node] for node, count in on.items())
                seen[place.__name__, places is None] += 1
    assert min(seen.values()) > 20


def test_a_gang_takes_as_few_nodes_as_it_can():
    for draw, snapshot in busy_clusters(2, 80):
        job = some_job(draw, "asks")
        places = pack_gang(job, snapshot.free)
        if places is not None:
            room = sorted(tasks_that_fit(job, snapshot.free).tolist(), reverse=True)
            least = next(count for count in range(len(room) + 1) if sum(room[:count]) >= job.tasks)
            assert len({place.node for place in places}) == least


def test_the_earliest_start_is_the_first_end_after_which_the_gang_fits():
    known = 0
    for draw, snapshot in busy_clusters(3, 80):
        ends = [one for one in snapshot.running.values() if one.expected_end_s is not None]
        for number in range(6):
            job = some_job(draw, f"j{number}")
            if slots(job, snapshot.free) >= job.tasks:
                continue
            then, expected = snapshot.free.copy(), None
            for end_s in sorted({one.expected_end_s for one in ends}):
                for one in ends:
                    if one.expected_end_s == end_s:
                        then.release(one.request, one.places)
                if slots(job, then) >= job.tasks:
                    expected = max(end_s, snapshot.now_s)
                    break
            found = reserve(job, snapshot.free, snapshot.running.values(), snapshot.now_s)
            assert (None if found is None else found.start_s) == expected
            if found is not None:
                known += 1
                assert (found.then.gpu_milli == then.gpu_milli).all()
                assert (found.then.cpu_milli == then.cpu_milli).all()
                assert (found.then.whole == then.whole).all()
    assert known > 50


def share_order(snapshot: Snapshot) -> list[str]:
    """The definition: again and again the first job of the tenant with the least."""
    has = Counter[str]()
    for one in snapshot.running.values():
        has[one.request.tenant] += len(one.places) * one.request.milli_per_task
    waiting, found = list(snapshot.waiting), []
    total = WHOLE_GPU * sum(node.gpus for node in snapshot.nodes)
    while waiting:
        heads = {job.tenant: job for job in reversed(waiting)}
        weights = {name: snapshot.quotas[name].weight if name in snapshot.quotas else 1.0 for name in heads}
        tenant = min(heads, key=lambda name: (has[name] / total / weights[name], heads[name].arrival_s, name))
        found.append(heads[tenant].job_id)
        waiting.remove(heads[tenant])
        has[tenant] += heads[tenant].tasks * heads[tenant].milli_per_task
    return found


@pytest.mark.parametrize("seed", range(10))
def test_jobs_come_one_by_one_from_the_tenant_with_the_smallest_share(seed: int):
    draw = random.Random(seed)
    nodes = uniform_nodes(4, 8)
    running = [
        RunningJob(JobRequest(f"r{at}", 1, 2, tenant=draw.choice("abc")), (TaskPlace(f"node-{at}", (0, 1)),))
        for at in range(4)
    ]
    waiting = [
        JobRequest(
            f"w{at}", draw.choice((1, 2)), draw.choice((1, 4)), tenant=draw.choice("abcd"), arrival_s=at
        )
        for at in range(30)
    ]
    quotas = [TenantQuota("a", 8, 8, draw.choice((1.0, 2.0)))]
    snapshot = snapshot_of(50.0, nodes, waiting, running, quotas)
    assert [job.job_id for job in by_share(snapshot)] == share_order(snapshot)


def best_steps(costs: np.ndarray, options: np.ndarray, gpus: int) -> list[int]:
    """Again and again the best step of all that still fit."""
    at, left = [0] * len(costs), gpus
    while True:
        steps = [
            ((costs[job, at[job]] - costs[job, to]) / (options[to] - options[at[job]]), job, to)
            for job in range(len(costs))
            for to in range(at[job] + 1, len(options))
            if options[to] - options[at[job]] <= left
        ]
        best = max(steps, default=(0.0, 0, 0))
        if best[0] <= 0:
            return options[at].tolist()
        left -= options[best[2]] - options[at[best[1]]]
        at[best[1]] = best[2]


def random_costs(draw: np.random.Generator, jobs: int) -> tuple[np.ndarray, np.ndarray]:
    most = draw.choice([1, 4, 8, 16, 25], jobs)
    options = possible_sizes(4, most, np.zeros(jobs, dtype=np.int64))
    costs = draw.uniform(0, 2, (jobs, len(options))) / (1 + options)
    costs[:, 0] = 1000 * draw.uniform(0.5, 2, jobs)
    costs[options > most[:, None]] = np.inf
    return options, costs


def test_sizes_of_elastic_jobs_are_those_of_taking_the_best_step_again_and_again():
    draw = np.random.default_rng(5)
    for _ in range(40):
        jobs, gpus = int(draw.integers(1, 9)), int(draw.integers(1, 60))
        options, costs = random_costs(draw, jobs)
        sizes = choose_sizes(costs, options, gpus, ["x"] * jobs, {"x": 10_000})
        assert sizes.tolist() == best_steps(costs, options, gpus)


def test_sizes_keep_to_every_limit_and_a_tenant_alone_gets_what_it_would_get_of_so_many_gpus():
    draw, limited = np.random.default_rng(1), 0
    for _ in range(100):
        jobs, tenants = int(draw.integers(1, 40)), int(draw.integers(1, 5))
        options, costs = random_costs(draw, jobs)
        gpus = int(draw.integers(1, 200))
        tenant, room = draw.integers(0, tenants, jobs), draw.integers(0, 60, tenants)
        sizes = choose_sizes(costs, options, gpus, tenant.tolist(), dict(enumerate(room.tolist())))
        assert sizes.sum() <= gpus and (np.bincount(tenant, sizes, tenants) <= room).all()
        limited += bool((sizes == 0).any())
        everybody = choose_sizes(costs, options, 10_000, ["x"] * jobs, {"x": gpus})
        assert everybody.tolist() == choose_sizes(costs, options, gpus, ["x"] * jobs, {"x": gpus}).tolist()
    assert limited > 30
