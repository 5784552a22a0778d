"""Who is refused and who is next among tenants with quotas, kept up to date, is the same as read from the queue."""

import random

import pytest

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.policy.guaranteed import GuaranteedJobs
from cumulo.cluster.decide.policy.preemptible import preemptible_on_nodes
from cumulo.cluster.decide.policy.quota_lines import KeyLines, quota_lines
from cumulo.cluster.decide.policy.share_order import ShareOrder
from cumulo.cluster.decide.queue import JobQueue
from cumulo.cluster.decide.quotas import QuotaBook, tenant_uses
from cumulo.cluster.decide.running import RunningTable
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota
from cumulo.cluster.simulate.traces import uniform_nodes


def by_urgency(job: JobRequest) -> tuple[int, float]:
    return -job.priority, job.arrival_s


def read_in_order(rows, book: QuotaBook, starts: int):
    """Names of those that are told, with the reason, and of those that start, until so many have."""
    found, least = [], {}
    for job, _, _, gpus, _ in rows:
        if gpus >= least.get(job.tenant, 1e9):
            continue
        refused = book.refuses(job, gpus)
        if refused is not None:
            found.append((job.job_id, refused))
            least[job.tenant] = gpus
            continue
        found.append((job.job_id, "starts"))
        if not starts:
            break
        starts -= 1
        book.count(job, gpus)
    return found


def read_from(lines, book: QuotaBook, starts: int):
    found = []
    for told, candidate in lines.in_turn(book):
        found += [(one.job_id, one.reason) for one in told]
        if candidate is None:
            break
        job, _, _, gpus, _ = candidate[2]
        found.append((job.job_id, "starts"))
        if not starts:
            break
        starts -= 1
        book.count(job, gpus)
    return found


@pytest.mark.parametrize("shares", (False, True))
def test_lines_of_tenants_with_quotas_are_those_of_the_whole_queue_while_jobs_come_and_go(shares):
    draw, queue, running, kept = random.Random(31), JobQueue(), RunningTable(), None
    nodes = uniform_nodes(4, 8)
    free, order = FreeCapacity(nodes), ShareOrder()
    quotas = {
        name: TenantQuota(name, 4.0, borrow, 1.0 + borrow / 8)
        for name, borrow in zip("abcd", (0, 4, 8, 0.25), strict=True)
    }
    told = started = 0
    for number in range(500):
        if len(queue) and draw.random() < 0.45:
            gone = queue.remove(draw.choice(list(queue)).job_id)
            if draw.random() < 0.6:
                running.put(RunningJob(gone, (TaskPlace("node-0", (0,)),) * gone.tasks))
        if running and draw.random() < 0.25:
            running.drop(draw.choice(list(running)))
        share = draw.random() < 0.2
        queue.add(
            JobRequest(
                f"j{number}", draw.choice((1, 1, 2, 3)), 1 if share else draw.choice((1, 2, 4, 8)),
                250 if share else 1000, cpu_milli=draw.choice((0, 500)), tenant=draw.choice("aabcde"),
                priority=draw.randrange(3), arrival_s=number if draw.random() < 0.7 else draw.uniform(0, 9),
            ),
            number,
        )  # fmt: skip
        if draw.random() < 0.3:
            continue  # not after each change
        snapshot = Snapshot(0.0, nodes, queue, running, free, quotas)
        kept = quota_lines(
            kept, snapshot, order.lines if shares else lambda _, some: KeyLines(some, by_urgency)
        )
        kept.update(QuotaBook(snapshot))
        rows = ShareOrder()(snapshot) if shares else queue.rows(by_urgency)
        starts = draw.choice((0, 1, 5))
        expected = read_in_order(rows, QuotaBook(snapshot), starts)
        assert read_from(kept, QuotaBook(snapshot), starts) == expected
        started += sum(why == "starts" for _, why in expected)
        told += sum(why != "starts" for _, why in expected)
    assert told > 200 and started > 200


def test_a_queue_that_is_read_in_parts_has_the_same_lines_though_jobs_come_and_go_meanwhile():
    draw, queue = random.Random(4), JobQueue()
    nodes = uniform_nodes(4, 8)
    quotas = {name: TenantQuota(name, 4.0, 4.0) for name in "abc"}
    snapshot = Snapshot(0.0, nodes, queue, RunningTable(), FreeCapacity(nodes), quotas)

    def come(number: int) -> None:
        tenant, gpus = draw.choice("abcd"), draw.choice((1, 2, 4, 8))
        queue.add(JobRequest(f"j{number}", 1, gpus, tenant=tenant, arrival_s=draw.uniform(0, 9)), number)

    for number in range(100):
        come(number)
    lines = quota_lines(None, snapshot, lambda _, some: KeyLines(some, by_urgency))
    parts = 0
    while not lines.complete(9):
        parts += 1
        queue.remove(draw.choice(list(queue)).job_id)
        come(100 + parts)
    assert parts > 8
    lines.update(QuotaBook(snapshot))
    expected = read_in_order(queue.rows(by_urgency), QuotaBook(snapshot), 30)
    assert read_from(lines, QuotaBook(snapshot), 30) == expected
    kinds = {why == "starts" for _, why in expected}
    assert kinds == {True, False}


def test_jobs_that_quotas_guarantee_are_those_of_tenants_below_them_in_the_order_of_arrival():
    draw, queue, running, kept = random.Random(8), JobQueue(), RunningTable(), GuaranteedJobs()
    nodes = uniform_nodes(4, 8)
    free = FreeCapacity(nodes)
    quotas = {name: TenantQuota(name, gpus) for name, gpus in zip("dacb", (1.0, 2.0, 3.0, 0.0), strict=True)}
    some = 0
    for number in range(400):
        if len(queue) and draw.random() < 0.6:
            gone = queue.remove(draw.choice(list(queue)).job_id)
            if draw.random() < 0.5:
                running.put(RunningJob(gone, (TaskPlace("node-0", (0,)),)))
        while len(running) > 5 or (running and draw.random() < 0.2):
            running.drop(draw.choice(list(running)))
        queue.add(JobRequest(f"j{number}", 1, 1, tenant=draw.choice("abcde"), arrival_s=number // 3), number)
        if draw.random() < 0.3:
            continue
        snapshot = Snapshot(0.0, nodes, queue, running, free, quotas)
        has = {name: sum(one.request.tenant == name for one in running.values()) for name in quotas}
        below = [name for name, quota in quotas.items() if has[name] < quota.gpus]
        expected = sorted(
            (job for job in queue if job.tenant in below),
            key=lambda job: (job.arrival_s, below.index(job.tenant)),
        )
        for waiting in (queue, tuple(queue)):
            asked = Snapshot(0.0, nodes, waiting, running, free, quotas)
            uses = tenant_uses(snapshot, preemptible_on_nodes(snapshot, lambda one: one.request.tenant))
            assert list(kept.in_order(asked, uses)) == expected
        some += bool(expected) and len(expected) < len(queue)
    assert some > 100
