"""A policy of your own: `cumulo simulate cluster --policy fifo,examples/cluster/largest_first.py:largest_first`."""

from cumulo.cluster.decide.decisions import JobPlacement
from cumulo.cluster.decide.fit import pack_gang


def largest_first(snapshot):
    """One gang at a time, the largest that fits."""
    for job in sorted(snapshot.waiting, key=lambda job: -job.gpus):
        places = pack_gang(job, snapshot.free)
        if places is not None:
            return [JobPlacement(job.job_id, places, "the largest that fits")]
    return []
