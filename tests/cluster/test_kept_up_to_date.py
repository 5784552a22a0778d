"""What is kept up to date between decisions says the same as what is worked out anew."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cumulo.cluster.decide import nodes as nodes_module
from cumulo.cluster.decide.decisions import JobPlacement, Waits
from cumulo.cluster.decide.elastic_jobs.columns import SpeedTables
from cumulo.cluster.decide.elastic_jobs.sizes import choose_sizes, possible_sizes, size_groups
from cumulo.cluster.decide.fit import _nodes_for, pack_gang, slots, tasks_that_fit
from cumulo.cluster.decide.jobs import JobRequest, SpeedTable
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity, members, node_set
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decide.policy import fair, preemptible
from cumulo.cluster.decide.policy.preemptible import coded_nodes, preemptible_on_nodes, preemptible_up_to
from cumulo.cluster.decide.queue import JobQueue
from cumulo.cluster.decide.quotas import tenant_uses
from cumulo.cluster.decide.releases import Releases
from cumulo.cluster.decide.running import RunningTable
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota, snapshot_of
from cumulo.cluster.simulate.play import play
from cumulo.cluster.simulate.traces import synthetic_trace, uniform_nodes
from tests.cluster.coming_and_going import come_or_go


def some_job(draw: random.Random, name: str) -> JobRequest:
    share = draw.random() < 0.2
    return JobRequest(
        name, draw.choice((1, 1, 2, 3, 9)), 1 if share else draw.choice((1, 2, 4, 8)), 250 if share else 1000,
        devices=draw.choice(((), (), ("a",))), tenant=draw.choice("xy"), arrival_s=draw.uniform(0, 9),
        predicted_s=draw.choice((None, draw.uniform(1, 99))), priority=sum(map(ord, name)) % 4,
    )  # fmt: skip


def states(seed: int, steps: int = 60):
    """A cluster on which jobs come and go: (free, running, releases) after each step."""
    draw = random.Random(seed)
    nodes = [
        ClusterNode(f"n{n}", draw.choice((2, 4, 8)), draw.choice("ab"), health="down" if n == 3 else "ready")
        for n in range(9)
    ]
    free, running = FreeCapacity(nodes), RunningTable()
    releases = Releases(free, {}).begin()
    for step in range(steps):
        come_or_go(draw, partial(some_job, draw, f"j{step}"), step, free, running, releases)
        yield draw, nodes, free, running, releases


def test_sets_of_nodes_are_those_with_so_many_free_gpus():
    for _, nodes, free, running, _ in states(1):
        fresh = snapshot_of(0.0, nodes, [], list(running.values())).free
        assert free.room == fresh.room and free.tally == fresh.tally and free.free_gpus == fresh.free_gpus
        for each in (1, 2, 3, 8):
            for devices in ((), ("a",), ("b", "a"), ("none",)):
                able = [n for n in range(9) if free.ready[n] and (not devices or nodes[n].device in devices)]
                asked = free.task_slots(each, devices), fresh.task_slots(each, devices)
                assert asked == (sum(int(free.whole[n]) // each for n in able),) * 2
        assert [members(some, 99) for some in free.room] == [
            [n for n in range(9) if free.whole[n] == count] for count in range(9)
        ]
    assert node_set(free.ready) == free.ready_set
    assert running.milli == RunningTable(list(running.values())).milli


def test_what_fits_on_each_node_is_kept_while_jobs_come_and_go(monkeypatch):
    """Also in copies, in parts of the cluster, when nodes go and come back, and when old changes are forgotten."""
    monkeypatch.setattr(nodes_module, "_MOST_CHANGES", 40)
    asked = [
        JobRequest("cores", 3, 1, cpu_milli=1500, memory_mib=700), JobRequest("share", 2, 1, 300),
        JobRequest("none", 2, 0, cpu_milli=2500), JobRequest("device", 1, 2, devices=("a",)),
        JobRequest("both", 4, 2, cpu_milli=1000, devices=("b",)),
    ]  # fmt: skip
    draw = random.Random(12)
    nodes = [
        ClusterNode(f"n{n}", draw.choice((2, 4, 8)), draw.choice("ab"), cpu_milli=9000, memory_mib=4000)
        for n in range(9)
    ]
    free, running = FreeCapacity(nodes), {}

    def anew(job: JobRequest, some: FreeCapacity) -> list[int]:
        fresh = FreeCapacity(nodes)
        fresh.gpu_milli, fresh.whole = some.gpu_milli, some.whole
        fresh.cpu_milli, fresh.memory_mib, fresh.ready = some.cpu_milli, some.memory_mib, some.ready
        return tasks_that_fit(job, fresh).tolist()

    def check(some: FreeCapacity) -> None:
        for job in draw.sample(asked, 3):
            assert tasks_that_fit(job, some).tolist() == anew(job, some)
            assert slots(job, some) == sum(anew(job, some))

    for step in range(400):
        if running and draw.random() < 0.5:
            gone, places = running.pop(draw.choice(list(running)))
            free.release(gone, places)
        else:
            job = replace(draw.choice(asked), job_id=f"j{step}")
            if (places := pack_gang(job, free)) is not None:
                running[job.job_id] = job, places
                free.allocate(job, places)
        if step % 3:  # not after each change
            check(free)
        if running and not step % 5:
            then = free.copy()
            then.release(*running[draw.choice(list(running))])
            check(then)
            check(free)
            check(free.narrowed(draw.getrandbits(len(nodes))))
            check(free.narrowed(draw.getrandbits(len(nodes))).copy())
        if not step % 60:
            free.set_ready(np.array([draw.random() < 0.8 for _ in nodes]))
            check(free)


def test_tenants_that_borrow_are_known_while_jobs_come_and_go():
    quotas = {name: TenantQuota(name, gpus) for name, gpus in (("x", 6.0), ("y", 3.0), ("z", 4.0))}
    seen = set()
    for _, nodes, free, running, _ in states(8, 200):
        snapshot = Snapshot(0.0, nodes, [], running, free, quotas)
        uses = tenant_uses(snapshot, preemptible_on_nodes(snapshot, fair._tenant))
        used = {
            name: sum(one.gpus for one in running.values() if one.request.tenant == name) for name in quotas
        }
        assert uses.below == {name for name in quotas if used[name] < quotas[name].gpus}
        over = {name for name in quotas if used[name] > quotas[name].gpus}
        assert uses.borrowing == over
        expected = np.zeros(len(nodes), dtype=np.int64)
        for one in running.values():
            for place in one.places if one.request.tenant in over else ():
                expected[free.index[place.node]] += one.request.milli_per_task
        assert uses.borrowed[0].tolist() == expected.tolist()
        seen |= {frozenset(over)}
    assert len(seen) == 4  # nobody, one, the other, both


def test_the_priority_up_to_which_jobs_must_stop_is_known_while_they_come_and_go():
    found = set()
    for draw, nodes, free, running, _ in states(11, 300):
        assert running.preemptible == Counter(one.request.priority for one in running.values())
        job = JobRequest(
            "urgent", draw.choice((1, 2, 5)), draw.choice((1, 2, 4, 8)), priority=draw.randint(0, 4)
        )
        up_to = preemptible_up_to(Snapshot(0.0, nodes, [], running, free))
        expected = None
        for at, level in enumerate(up_to.levels if up_to.levels else ()):
            left = free.gpu_milli.sum(axis=1)
            for one in running.values():
                for place in one.places if one.request.priority <= level < job.priority else ():
                    left[free.index[place.node]] += one.request.milli_per_task
            tasks = sum(int(room) // (1000 * job.gpus_per_task) for room in left[free.ready])
            if level < job.priority and tasks >= job.tasks:
                expected = at
                break
        assert up_to.first_with_room(job, free) == expected
        found.add(expected)
    assert found >= {None, 0, 1, 3}


def test_the_nodes_where_the_fewest_gpus_are_missing_are_known_while_jobs_come_and_go(monkeypatch):
    """Also when more of them are asked for than before, and when a node is lost."""
    monkeypatch.setattr(preemptible, "_MORE_LISTED", 0)
    long = 0
    for number, (draw, nodes, free, running, _) in enumerate(states(13, 300)):
        if number == 150:
            free.set_ready(np.array([node.name not in ("n1", "n3") for node in nodes]))
        up_to = preemptible_up_to(Snapshot(0.0, nodes, [], running, free))
        job = JobRequest("urgent", 1, draw.choice((1, 2, 4)), priority=9, devices=draw.choice(((), ("a",))))
        up_to.first_with_room(job, free)
        for at, level in enumerate(up_to.levels):
            found = []
            for node in np.flatnonzero(free.ready):
                stops = sum(
                    one.request.milli_per_task
                    for one in running.values()
                    for place in one.places
                    if place.node == nodes[node].name and one.request.priority <= level
                )
                need = job.gpus_per_task - int(free.whole[node]) % job.gpus_per_task
                if stops >= 1000 * need and (not job.devices or nodes[node].device in job.devices):
                    found.append((need, int(node)))
            many = draw.choice((1, 2, 9))
            expected = [node for _, node in sorted(found)][:many]
            assert coded_nodes(up_to.codes_in_order(job, at, free, many)) == expected
            long += len(expected) > 2
    assert long > 50


def test_a_gang_gets_the_nodes_that_a_search_over_all_nodes_finds():
    tried = 0
    for draw, _, free, _, _ in states(2, 200):
        job = some_job(draw, "asks")
        fits = tasks_that_fit(job, free)
        assert slots(job, free) == fits.sum()
        places = pack_gang(job, free)
        assert (places is None) == (int(fits.sum()) < job.tasks)
        if places is not None and job.tasks > 1 and not job.fractional:
            tried += 1
            found: dict[int, int] = {}
            for place in places:
                found[free.index[place.node]] = found.get(free.index[place.node], 0) + 1
            assert list(found.items()) == _nodes_for(job.tasks, fits, free.whole)
    assert tried > 20


def test_the_earliest_start_is_the_first_end_after_which_the_gang_fits():
    known = 0
    asked = [JobRequest("a", 2, 2), JobRequest("b", 3, 4), JobRequest("c", 1, 8), JobRequest("d", 9, 1)]
    asked += [JobRequest("e", 3, 2, devices=("a",)), JobRequest("f", 5, 1, devices=("b",))]
    for _, _, free, running, releases in states(3, 150):
        for job in asked:
            if slots(job, free) >= job.tasks:
                continue
            then, expected = free.copy(), None
            for one in sorted(
                (one for one in running.values() if one.expected_end_s is not None),
                key=lambda one: one.expected_end_s or 0.0,
            ):
                then.release(one.request, one.places)
                if slots(job, then) >= job.tasks:
                    expected = one.expected_end_s
                    break
            start = releases.earliest(job)
            assert (None if start is None else start.at_s) == expected
            known += expected is not None
    assert known > 50


def test_a_queue_keeps_every_order_it_was_asked_for():
    draw, queue, there = random.Random(4), JobQueue(), {}

    def longest(job):
        return -(job.predicted_s or 0.0)

    for number in range(200):
        if there and draw.random() < 0.4:
            name = draw.choice(list(there))
            assert queue.remove(name) is there.pop(name)
        else:
            job = some_job(draw, f"j{number}")
            there[job.job_id] = job
            queue.add(job, number)
        assert list(queue) == sorted(there.values(), key=lambda job: job.arrival_s)
        assert list(queue.ordered(longest)) == sorted(there.values(), key=longest)
        assert {name: list(some) for name, some in queue.tenants.items()} == {
            name: [job for job in queue if job.tenant == name] for name in {job.tenant for job in queue}
        }
    assert sum(map(len, queue.by_shape.values())) == len(there)


def test_sizes_of_elastic_jobs_are_those_of_taking_the_best_step_again_and_again():
    draw = np.random.default_rng(5)
    for _ in range(25):
        jobs, gpus = int(draw.integers(1, 9)), int(draw.integers(1, 60))
        most = draw.integers(1, 25, jobs)
        options = possible_sizes(4, most, np.zeros(jobs, dtype=np.int64))
        costs = draw.uniform(0, 2, (jobs, len(options))) / (1 + options)
        costs[:, 0] = 1000 * draw.uniform(0.5, 2, jobs)
        costs[options > most[:, None]] = np.inf
        at, left = [0] * jobs, gpus
        while True:
            steps = [
                ((costs[job, at[job]] - costs[job, to]) / (options[to] - options[at[job]]), job, to)
                for job in range(jobs)
                for to in range(at[job] + 1, len(options))
                if options[to] - options[at[job]] <= left
            ]
            best = max(steps, default=(0.0, 0, 0))
            if best[0] <= 0:
                break
            left -= options[best[2]] - options[at[best[1]]]
            at[best[1]] = best[2]
        assert choose_sizes([(np.arange(jobs), costs)], options, gpus).tolist() == options[at].tolist()


def test_jobs_with_few_sizes_get_the_same_when_only_those_are_looked_at():
    draw = np.random.default_rng(5)
    for _ in range(100):
        jobs = int(draw.integers(1, 60))
        most = draw.choice([1, 4, 8, 16, 32, 64, 256, 512], jobs)
        options = possible_sizes(8, most, np.zeros(jobs, dtype=np.int64))
        costs = np.sort(draw.random((jobs, len(options))), axis=1)[:, ::-1].copy()
        costs[options > most[:, None]] = np.inf
        groups = [(rows, costs[rows, :width]) for rows, width in size_groups(options, most)]
        assert sorted(row for rows, _ in groups for row in rows.tolist()) == list(range(jobs))
        gpus = int(draw.integers(1, int(most.sum()) + 9))
        all_together = choose_sizes([(np.arange(jobs), costs)], options, gpus)
        assert choose_sizes(groups, options, gpus).tolist() == all_together.tolist()


def test_a_share_beyond_the_speed_table_is_looked_up_where_the_table_ends():
    table = SpeedTable((1.0, 1.5), (0.0, 1.2, 2.0, 0.0))
    reads = []

    class Counted(SpeedTable):
        def goodput(self, gpus: int, nodes: int) -> float:
            reads.append(gpus)
            return table.goodput(gpus, nodes)

    tables = SpeedTables()
    number = tables.number(Counted(table.one_node, table.many_nodes))
    assert tables.within(number, 80_000, 2) == 2.0 and len(reads) <= 4
    assert [tables.within(number, share, 2) for share in (1, 2, 3, 4)] == [1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("name", ("backfill", "shortest", "conservative", "fair", "las", "priority"))
def test_decisions_are_those_of_a_snapshot_that_is_built_anew(name):
    looked = 0

    def both(snapshot: Snapshot):
        nonlocal looked
        decided = policy_named(name).decide(snapshot)
        if looked % 7 == 0:
            anew = snapshot_of(
                snapshot.now_s, snapshot.nodes, tuple(snapshot.waiting), tuple(snapshot.running.values())
            )
            again = policy_named(name).decide(anew)
            starts = [one for one in decided if isinstance(one, JobPlacement)]
            assert starts == [one for one in again if isinstance(one, JobPlacement)]
        looked += 1
        return decided

    run = play(uniform_nodes(8, 8), synthetic_trace(150, 64, 1.6, seed=1), both)
    assert len(run.outcomes) == 150 and looked > 150


@pytest.mark.parametrize(
    ("name", "moves"),
    (("backfill", 0), ("fair", 0), ("priority", 1), ("fifo+defrag", 5), ("backfill+defrag", 5)),
)
def test_a_policy_that_remembers_decides_as_one_that_has_seen_nothing(name, moves):
    remembers = policy_named(name).decide

    def both(snapshot: Snapshot):
        decided, fresh = remembers(snapshot), policy_named(name).decide(snapshot)
        assert [one for one in decided if not isinstance(one, Waits)] == [
            one for one in fresh if not isinstance(one, Waits)
        ]
        return decided

    trace = [
        replace(one, request=replace(one.request, checkpoint_s=number % 7, priority=number % 3))
        for number, one in enumerate(synthetic_trace(250, 64, 1.4, seed=2))
    ]
    run = play(uniform_nodes(8, 8), trace, both)
    assert len(run.outcomes) == 250 and run.resizes + run.evictions >= moves
