"""What bounds the sizes of elastic jobs: the limits of their tenants, and how many waiting jobs a decision looks
at."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.elastic_jobs.columns import ActiveJobs
from cumulo.cluster.decide.elastic_jobs.sizes import NO_LIMIT, TenantLimits
from cumulo.cluster.decide.nodes import Ints
from cumulo.cluster.decide.quotas import QuotaBook

# Waiting jobs that are looked at besides those for which there are GPUs: of all, and of a tenant with a limit.
_MORE, _MORE_OF_TENANT = 4096, 64
_SHORT = 1 << 15


def tenant_limits(jobs: ActiveJobs, book: QuotaBook, parts: int = 1) -> TenantLimits | None:
    """What these jobs may have together: what they have, and the rest up to the limit, or its share if they are
    one of several parts of the jobs. None: there are no quotas."""
    if not book.quotas:
        return None
    tenant, names = jobs.tenant, list(jobs.numbers.tenants)
    there = np.flatnonzero(np.bincount(tenant, minlength=len(names)))
    left = np.full(len(names), NO_LIMIT)
    left[there] = np.minimum(book.left_to_each([names[number] for number in there.tolist()]), NO_LIMIT)
    has = np.bincount(tenant, jobs.current, len(names)).astype(np.int64)
    room = has - np.maximum(left, 0) // -parts
    return TenantLimits(tenant, room)


def looked_at(
    jobs: ActiveJobs,
    ranks_of: Callable[[ActiveJobs], Ints | None],
    limits: TenantLimits | None,
    gpus: int,
) -> NDArray[np.bool_]:
    """All that run, and of those that wait as many as there may be GPUs for, and some more, for which others would
    be preempted: those that count most, and the first of them."""
    if limits is None:
        tenant, room, more = (np.zeros(len(jobs), dtype=np.int64), np.array([gpus]), _MORE)
    else:
        tenant, room, more = limits.tenant, limits.room, _MORE_OF_TENANT
    found = np.ones(len(jobs), dtype=np.bool_)
    running = np.bincount(tenant[jobs.waits :], minlength=len(room))
    most = np.maximum(room - running, 0) + more
    crowded = np.bincount(tenant[: jobs.waits], minlength=len(room)) > most
    order = np.flatnonzero(crowded[tenant[: jobs.waits]])
    if not len(order):
        return found
    ranks = ranks_of(jobs)
    if ranks is not None:
        order = order[np.argsort(ranks[order], kind="stable")]
    of = tenant[order]
    if len(room) < _SHORT:
        of = of.astype(np.int16)  # they are sorted without being compared, several times as fast
    order = order[np.argsort(of, kind="stable")]
    of = tenant[order]
    begins = np.flatnonzero(np.diff(of, prepend=-1))
    first = np.zeros(len(room), dtype=np.int64)
    first[of[begins]] = begins
    found[order[np.arange(len(order)) - first[of] >= most[of]]] = False
    return found
