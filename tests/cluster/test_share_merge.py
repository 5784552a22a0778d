"""Jobs of several tenants merged by share, a stretch at a time, are those that a merge one by one finds."""

import heapq
import itertools
import random
from functools import partial

import pytest

from cumulo.cluster.decide.jobs import JobRequest
from cumulo.cluster.decide.policy import share_merge
from cumulo.cluster.decide.policy.share_merge import RestOfLine, merged, merged_besides
from cumulo.cluster.decide.shapes import GangShape


def some_rests(draw: random.Random, shapes: list[GangShape], lines: int) -> list[RestOfLine]:
    """Lines of some length, of which some ask for nothing that is counted, so that shares are equal."""
    rests = []
    for line in range(lines):
        least = draw.choice((0, 1, 1))
        rows = [
            (JobRequest(f"{line}.{number}", 1, 1, arrival_s=number // 2), draw.choice(shapes), 1.0,
             draw.choice((least, 1, 8)) * 1.0, draw.choice((0, 500)))
            for number in range(draw.choice((0, 1, 5, 30)))
        ]  # fmt: skip
        start = draw.randrange(len(rows) + 1)
        rest = RestOfLine(
            f"t{line}", draw.choice((1.0, 2.0)), (99.0, 9000.0), start, draw.randrange(9), 0.0,
            partial(lambda some, at: iter(some[at:]), rows),
        )  # fmt: skip
        rests.append(rest)
    return rests


@pytest.mark.parametrize("many", [1, 4, 256])
def test_a_merge_by_stretches_is_a_merge_one_by_one(monkeypatch, many):
    monkeypatch.setattr(share_merge, "_MANY", many)
    monkeypatch.setattr(share_merge, "_MOST_OF_ONE", max(2, many // 2))
    draw, cut = random.Random(many), 0
    shapes = [GangShape(JobRequest("shape", tasks, 1)) for tasks in (1, 2, 3)]
    for seed in range(300):
        distance = draw.choice((0.0, 1e-3, 0.02, 1.0))
        lines = draw.choice((1, 3, 9))

        def rests(seed=seed, lines=lines):
            return some_rests(random.Random(seed), shapes, lines)

        expected = list(heapq.merge(*[rest.entries() for rest in rests()]))
        assert list(itertools.chain.from_iterable(merged(rests(), distance))) == expected
        failed, at_most = draw.sample(shapes, draw.randrange(3)), draw.choice((1, 9, 40, 999))
        others = [entry[4] for entry in expected[:at_most] if entry[4][1] not in failed]
        assert merged_besides(rests(), distance, failed, at_most) == others
        cut += at_most < len(expected) and bool(failed) and bool(others)
    assert cut > 30
