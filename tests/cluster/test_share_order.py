"""Waiting jobs in the order of fair shares, as they are kept from one decision to the next."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.policy import share_merge, share_order
from cumulo.cluster.decide.policy.orders import PassedOver, rows_besides
from cumulo.cluster.decide.queue import JobQueue
from cumulo.cluster.decide.running import RunningTable
from cumulo.cluster.decide.shapes import GangShape
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota
from cumulo.cluster.simulate.traces import uniform_nodes


def some_job(draw: random.Random, number: int) -> JobRequest:
    share = draw.random() < 0.2
    return JobRequest(
        f"j{number}", draw.choice((1, 1, 2, 3, 9)), 1 if share else draw.choice((1, 2, 4, 8)),
        250 if share else 1000, cpu_milli=draw.choice((0, 500)), tenant=draw.choice("vwxyz"),
        arrival_s=number if draw.random() < 0.7 else draw.uniform(0, 9),
    )  # fmt: skip


@dataclass
class Passed(PassedOver):
    failed: dict[GangShape, str]
    harmful: dict[GangShape, float]


@pytest.mark.parametrize("quotas", ({}, {"x": TenantQuota("x", 8.0, weight=2.0)}))
def test_the_order_by_shares_is_kept_while_jobs_come_and_go(quotas, monkeypatch):
    monkeypatch.setattr(share_order, "_KEPT", 8)
    monkeypatch.setattr(share_order, "_MORE_KEPT", 4)
    monkeypatch.setattr(share_order, "_FEWEST_KEPT", 5)
    monkeypatch.setattr(share_order, "_STRETCH", 3)
    monkeypatch.setattr(share_order, "_FEW_MORE", 2)
    monkeypatch.setattr(share_merge, "_MANY", 4)
    monkeypatch.setattr(share_merge, "_MOST_OF_ONE", 3)
    draw, queue, running, order = random.Random(6), JobQueue(), RunningTable(), share_order.ShareOrder()
    nodes = uniform_nodes(4, 8)
    free = FreeCapacity(nodes)
    seen = Counter()
    for number in range(900):
        if draw.random() < 0.5 and len(queue):
            gone = queue.remove(draw.choice(list(queue)).job_id)
            if draw.random() < 0.5:
                running.put(RunningJob(gone, (TaskPlace("node-0", (0,)),) * gone.tasks))
        if draw.random() < 0.2 and running:
            running.drop(draw.choice(list(running)))
        if number < 600 or draw.random() < 0.3:
            for more in range(40 if number % 150 == 149 else 1):  # sometimes many arrive at once
                queue.add(some_job(draw, number + 1000 * more), number + 1000 * more)
        snapshot = Snapshot(0.0, nodes, queue, running, free, quotas)
        anew = share_order.ShareOrder()(Snapshot(0.0, nodes, tuple(queue), dict(running), free, quotas))
        expected = [row[0] for row in anew]
        many = draw.choice((1, 5, 20, draw.randrange(1, 99), 999))
        if draw.random() < 0.5 or not expected:
            rows, read = order(snapshot), draw.choice((0, 1, 1, 2, 12))
            assert [row[0] for row in itertools.islice(rows, read)] == expected[:read]
            if draw.random() < 0.5:
                assert [row[0] for row in itertools.islice(rows, many)] == expected[read : read + many]
                continue
            failed = {shape for shape in queue.by_shape if draw.random() < 0.7}
            others = [job for job in expected[read : read + many] if queue.shapes[job.job_id] not in failed]
            found = [row[0] for row in rows_besides(rows, many, Passed(dict.fromkeys(failed, ""), {}))]
            assert [job for job in found if queue.shapes[job.job_id] not in failed] == others
            seen["besides", len(others) > 3] += 1
            continue
        lines, last = order.lines(snapshot, queue), draw.choice(expected)
        own, place_of = queue.by_tenant[last.tenant], lines.places(last.tenant)
        at = own.jobs.index(last)
        before = own.jobs[:at]
        milli, cpu_milli = own.asked_before(at)
        assert milli == sum(job.tasks * job.milli_per_task for job in before)
        assert cpu_milli == sum(job.tasks * job.cpu_milli for job in before)
        places = [place_of(entry) for entry in own.keys if draw.random() < 0.5 or entry == own.keys[at]]
        assert places == sorted(places) and len(set(places)) == len(places)
        place_of, among = lines.places(last.tenant), lines.places(last.tenant)(own.keys[at])
        assert among in places and [place_of(entry) for entry in own.keys][at] == among
        behind = expected[expected.index(last) + 1 :]
        rows, read = lines.rows_behind(among), draw.choice((0, many))
        assert [row[0] for row in itertools.islice(rows, read)] == behind[:read]
        if not read:
            some = [row[0] for row in rows_besides(rows, many, Passed({}, {}))]
            assert some == behind[:many]
        seen[len(expected) - len(behind) > 12] += 1
    assert len(order._entries) > 0 and min(seen.values()) > 20


def test_many_that_arrive_at_once_are_not_all_listed():
    queue, order = JobQueue(), share_order.ShareOrder()
    nodes = uniform_nodes(4, 8)
    snapshot = Snapshot(0.0, nodes, queue, RunningTable(), FreeCapacity(nodes))
    arrived = itertools.count()
    for many in (10, 3000, 10):
        for number in itertools.islice(arrived, many):
            queue.add(JobRequest(f"j{number}", 1, 1, tenant=f"t{number % 9}", arrival_s=number), number)
        found = [row[0] for row in itertools.islice(order(snapshot), 300)]
        anew = Snapshot(0.0, nodes, tuple(queue), {}, snapshot.free)
        assert found == [row[0] for row in itertools.islice(share_order.ShareOrder()(anew), 300)]
        assert len(order._entries) <= 310
