"""Jobs behind a reserved start: what counting and kept sets of nodes tell is what placing them would tell."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

from cumulo.cluster.decide.check import left_on
from cumulo.cluster.decide.fit import pack_gang, slots
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.nodes import ClusterNode, FreeCapacity, members
from cumulo.cluster.decide.policy.ends_ahead import Moment, _LeftNodes, _LeftShares, ends_until_it_fits
from cumulo.cluster.decide.policy.reservations import Reservation, Reservations
from cumulo.cluster.decide.releases import Releases
from cumulo.cluster.decide.running import RunningTable
from cumulo.cluster.decide.snapshot import Snapshot
from tests.cluster.coming_and_going import come_or_go


def some_job(draw: random.Random, name: str) -> JobRequest:
    share = draw.random() < 0.15
    return JobRequest(
        name, draw.choice((1, 1, 2, 3)), 1 if share else draw.choice((1, 2, 3, 4, 8)), 250 if share else 1000,
        devices=draw.choice(((), (), ("a",))), predicted_s=draw.choice((None, draw.uniform(1, 99))),
    )  # fmt: skip


def busy_clusters(seed: int, steps: int):
    """A cluster on which jobs come and go, and nodes fail and come back."""
    draw = random.Random(seed)
    nodes = [ClusterNode(f"n{n}", draw.choice((4, 8)), draw.choice("ab")) for n in range(9)]
    free, running = FreeCapacity(nodes), RunningTable()
    releases = Releases(free, {}).begin()
    for step in range(steps):
        if draw.random() < 0.1:
            number = draw.randrange(9)
            ready = free.ready.copy()
            ready[number] = not ready[number]
            free.set_ready(ready)
            releases.set_health(number)
        come_or_go(draw, partial(some_job, draw, f"j{step}"), step, free, running, releases)
        yield draw, Snapshot(float(step), nodes, (), running, free, {}, releases)


def test_nodes_that_a_reserved_job_has_no_use_for_are_known_while_jobs_come_and_go():
    moment, asked, found = 0.0, JobRequest("reserved", 2, 4), set()
    for draw, snapshot in busy_clusters(1, 300):
        if draw.random() < 0.2:
            moment = snapshot.now_s + draw.uniform(0, 60)
            asked = JobRequest("reserved", 2, draw.choice((1, 2, 4)), devices=draw.choice(((), ("a",))))
        free, ends = snapshot.free, snapshot.releases.gpu_end_s
        expected = [
            number for number, node in enumerate(free.nodes)
            if free.ready[number] and (
                sum(end_s <= moment for end_s in ends[number]) < asked.gpus_per_task
                or bool(asked.devices and node.device not in asked.devices)
            )
        ]  # fmt: skip
        assert members(snapshot.releases.of_no_use(asked, moment), 99) == expected
        found.add(tuple(expected))
    assert len(found) > 20


def test_a_job_that_harms_a_reserved_start_by_counting_does_so_wherever_it_is_placed():
    seen = Counter()
    for draw, snapshot in busy_clusters(2, 1500):
        reserved = Reservations(snapshot, pack_gang)
        devices = draw.choice(((), (), ("a",), ("b", "a"), ("b",)))
        first = JobRequest("first", draw.choice((1, 2, 4, 6)), draw.choice((2, 4, 8)), devices=devices)
        if slots(first, snapshot.free) >= first.tasks or reserved.reserve(first) is None:
            continue
        for _ in range(4):
            job = some_job(draw, "behind")
            places = pack_gang(job, snapshot.free)
            if places is None:
                continue
            certain = reserved.certain_harm(job)
            harmless = reserved.without_harm(job, places)
            assert certain is None or harmless is certain
            seen[certain is not None, isinstance(harmless, Reservation)] += 1
        reserved.take_back()
    assert min(seen[True, True], seen[False, True], seen[False, False]) > 20


def test_what_certainly_harms_one_of_several_reserved_starts_finds_no_places():
    seen = Counter()
    for draw, snapshot in busy_clusters(3, 1500):
        reserved = Reservations(snapshot, pack_gang)
        for number in range(3):
            devices = draw.choice(((), (), ("a",), ("b",)))
            one = JobRequest(f"r{number}", draw.choice((1, 2, 4, 6)), draw.choice((2, 4, 8)), devices=devices)
            if slots(one, snapshot.free) < one.tasks:
                reserved.reserve(one)
        if len(reserved.made) > 1:
            for _ in range(4):
                job = some_job(draw, "behind")
                places = pack_gang(job, snapshot.free)
                if places is not None:
                    certain = reserved.certain_harm(job) is not None
                    harmful = isinstance(reserved.without_harm(job, places), Reservation)
                    assert harmful or not certain
                    seen[certain, harmful] += 1
        reserved.take_back()
    assert min(seen[True, True], seen[False, True], seen[False, False]) > 20


def test_what_jobs_leave_is_counted_as_gpu_by_gpu():
    draw, gained = random.Random(5), 0
    for _ in range(60):
        nodes = [ClusterNode(f"n{n}", 4, draw.choice("ab"), 8000, 4000) for n in range(5)]
        free, running = FreeCapacity(nodes), []
        for number in range(30):
            cores = {"cpu_milli": draw.choice((0, 500, 1500)), "memory_mib": draw.choice((0, 300))}
            share = draw.random() < 0.3
            job = JobRequest(
                f"j{number}",
                draw.choice((1, 2)),
                draw.choice((1, 2)),
                devices=draw.choice(((), ("a",))),
                **cores,
            )
            job = replace(job, gpus_per_task=1, gpu_milli=draw.choice((250, 500))) if share else job
            places = pack_gang(job, free)
            if places is not None:
                free.allocate(job, places)
                running.append(RunningJob(job, places))
        draw.shuffle(running)
        asked = JobRequest(
            "asked", 9, draw.choice((0, 1, 2)), cpu_milli=draw.choice((700, 2000)),
            memory_mib=draw.choice((0, 900)), devices=draw.choice(((), ("a",))),
        )  # fmt: skip
        counts, shares = _LeftNodes(asked, free), _LeftShares(asked, free)
        for one in running:
            counts.leave(one)
            shares.leave(one)
            if draw.random() < 0.5:
                before = counts.able
                assert counts.count() == shares.count()
                gained += counts.able > before
    assert gained > 100


def test_what_is_free_at_a_reserved_start_is_what_a_cluster_without_the_ended_jobs_has():
    draw, seen = random.Random(8), Counter()
    for _ in range(150):
        nodes = [ClusterNode(f"n{n}", draw.choice((2, 4)), draw.choice("ab"), 8000, 4000) for n in range(6)]
        free, running = FreeCapacity(nodes), []
        for number in range(30):
            share = draw.random() < 0.3
            job = JobRequest(
                f"j{number}", draw.choice((1, 2)), 1 if share else draw.choice((1, 2)), 250 if share else 1000,
                cpu_milli=draw.choice((0, 500, 1500)), memory_mib=draw.choice((0, 300)), predicted_s=9.0,
            )  # fmt: skip
            if (places := pack_gang(job, free)) is not None:
                free.allocate(job, places)
                running.append(RunningJob(job, places, 0.0, float(number)))
        share, tasks = draw.random() < 0.3, draw.choice((1, 2, 4))
        gpus, milli = (1, 500) if share else (draw.choice((0, 1, 2)), 1000)
        asked = JobRequest("asked", tasks, gpus, milli, draw.choice((700, 2000)), 100)
        ends = [(float(at), one.job_id) for at, one in enumerate(running)]
        by_name = {one.job_id: one for one in running}
        found = ends_until_it_fits(asked, free, ends, by_name.__getitem__)
        if slots(asked, free) >= asked.tasks or found is None:
            continue
        then = free.copy()
        for one in found.played:
            then.release(one.request, one.places)
        places = pack_gang(asked, then)
        assert places is not None
        then.allocate(asked, places)
        for place in (pack_gang, lambda job, free: pack_gang(job, free)):  # a placer that is not known
            moment = Moment(asked, free, found, [], 0, place)
            for number, node in enumerate(nodes):
                assert moment._left_beside(node.name) == left_on(then, number)
        seen[share, asked.tasks > 1] += 1
    assert len(seen) == 4 and min(seen.values()) > 3
