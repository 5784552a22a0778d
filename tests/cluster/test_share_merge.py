"""Jobs of several tenants merged by share, a stretch at a time or in columns, are those that a merge one by one
finds."""

import heapq
import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.policy import share_merge
from cumulo.cluster.decide.policy.share_merge import FirstInColumns, RestOfLine, by_share, merged
from cumulo.cluster.decide.queue import JobQueue

TOTAL = 99_000.0, 9000.0


def some_queue(draw: random.Random) -> JobQueue:
    """Tenants with some jobs each, of which some ask for nothing that is counted, so that shares are equal."""
    queue = JobQueue()
    for tenant in range(draw.choice((1, 3, 9))):
        least = draw.choice((0, 1, 1))
        for number in range(draw.choice((1, 5, 30))):
            gpus = draw.choice((least, 1, 8))
            job = JobRequest(
                f"{tenant}.{number}", 1, gpus, draw.choice((1000, 300)) if gpus == 1 else 1000,
                cpu_milli=draw.choice((0, 0, 500)), tenant=f"t{tenant}", arrival_s=number // 2,
                predicted_s=draw.choice((None, draw.uniform(0, 20))),
            )  # fmt: skip
            queue.add(job, 100 * tenant + number)
    return queue


@pytest.mark.parametrize("many", [1, 4, 256])
def test_a_merge_by_stretches_or_in_columns_is_a_merge_one_by_one(monkeypatch, many):
    monkeypatch.setattr(share_merge, "_MANY", many)
    monkeypatch.setattr(share_merge, "_FEW", max(2, many // 2))
    monkeypatch.setattr(share_merge, "_WINDOW", max(2, many))
    monkeypatch.setattr(share_merge, "_MOST_OF_ONE", max(2, many // 2))
    draw, seen = random.Random(many), Counter()
    for _ in range(150):
        queue = some_queue(draw)
        has = {name: (draw.choice((0, 5000, 700)), draw.choice((1.0, 2.0))) for name in queue.by_tenant}
        for _ in range(2):
            full = {
                name: list(by_share(name, has[name][1], TOTAL, has[name][0], 0.0, line.rows()))
                for name, line in queue.by_tenant.items()
            }
            starts = {name: draw.randrange(len(entries) + 1) for name, entries in full.items()}

            def rests(starts=starts, has=has, queue=queue):
                found = []
                for name, start in starts.items():
                    milli, cpu, line = has[name][0], 0.0, queue.by_tenant[name]
                    for row in itertools.islice(line.rows(), start):
                        milli, cpu = milli + row[1].milli, cpu + row[4]
                    found.append(RestOfLine(name, has[name][1], TOTAL, start, milli, cpu, line))
                return found

            expected = list(heapq.merge(*[full[name][start:] for name, start in starts.items()]))
            distance = draw.choice((0.0, 1e-3, 0.02, 1.0))
            assert list(itertools.chain.from_iterable(merged(rests(), distance))) == expected
            at_most, now_s = draw.choice((1, 9, 40, 999)), draw.uniform(0, 9)
            columns, rows = (
                FirstInColumns(rests(), at_most, now_s),
                [entry[4] for entry in expected[:at_most]],
            )
            assert [columns.row(at) for at in range(len(rows))] == rows
            assert columns.ends_s.tolist() == [now_s + row[2] for row in rows]
            assert columns.shapes.tolist() == [row[1].number for row in rows]
            latest_s = np.array([draw.choice((-math.inf, 20.0, math.inf)) for _ in range(99)])
            able = [at for at, row in enumerate(rows) if now_s + row[2] <= latest_s[row[1].number]]
            at, found = columns.next_one(0, latest_s), []
            while at is not None:
                found.append(at)
                at = columns.next_one(at + 1, latest_s)
            assert found == able
            seen["cut"] += at_most < len(expected) and len(able) > 1
            seen["left out"] += len(able) < len(rows)
            for job in draw.sample(list(queue), len(queue) // 4):  # the columns are kept up to date
                if len(queue.by_tenant[job.tenant].jobs) > 1:
                    tenant, number = map(int, job.job_id.split("."))
                    queue.remove(job.job_id)
                    if draw.random() < 0.5:
                        queue.add(job, 100 * tenant + number)
    assert min(seen["cut"], seen["left out"]) > 30
