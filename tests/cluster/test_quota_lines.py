"""Who is refused and who is next among tenants with quotas, kept up to date, is the same as read from the queue."""

import random

import pytest

from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.policy.quota_lines import KeyLines, quota_lines
from cumulo.cluster.decide.policy.share_order import ShareOrder
from cumulo.cluster.decide.queue import JobQueue
from cumulo.cluster.decide.quotas import QuotaBook
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
