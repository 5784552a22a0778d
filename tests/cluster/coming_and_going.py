"""Clusters on which jobs come and go, for tests of what is kept up to date while they do."""

import random
from collections.abc import Callable

from cumulo.cluster.decide.fit import pack_gang
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.nodes import FreeCapacity
from cumulo.cluster.decide.releases import Releases
from cumulo.cluster.decide.running import RunningTable


def come_or_go(
    draw: random.Random,
    next_job: Callable[[], JobRequest],
    now_s: float,
    free: FreeCapacity,
    running: RunningTable,
    releases: Releases,
) -> None:
    """A running job ends, or the next one starts if it fits."""
    if running and draw.random() < 0.45:
        gone = running.drop(draw.choice(list(running)))
        free.release(gone.request, gone.places)
        releases.remove(gone.request, gone.places, gone.expected_end_s)
        return
    job = next_job()
    places = pack_gang(job, free)
    if places is not None:
        ends = None if job.predicted_s is None else now_s + job.predicted_s
        running.put(RunningJob(job, places, now_s, ends))
        free.allocate(job, places)
        releases.add(job, places, ends)
