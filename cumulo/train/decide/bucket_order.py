"""In which order gradients leave when the network is slower than backward: first what the next forward needs first
(ByteScheduler, Peng et al. 2019). Pure: all ranks work out the same order from the same figures, because ranks that
each chose by themselves would wait for one another.

    send_order([BucketTiming(ready_s=0.1, link_s=0.3, needed=4), ...])  # numbers of buckets
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BucketTiming:
    ready_s: float  # after the begin of the last backward: its gradients are complete
    link_s: float  # that the network needs for it
    needed: int  # the place in forward of the first layer that needs it


def send_order(buckets: Sequence[BucketTiming]) -> tuple[int, ...]:
    """Whenever the network is free, the bucket that is needed first, of those that are ready."""
    coming = sorted(range(len(buckets)), key=lambda number: (buckets[number].ready_s, number), reverse=True)
    waiting: list[tuple[int, int]] = []
    order: list[int] = []
    now_s = 0.0
    while coming or waiting:
        if not waiting:
            now_s = max(now_s, buckets[coming[-1]].ready_s)
        while coming and buckets[coming[-1]].ready_s <= now_s:
            number = coming.pop()
            heapq.heappush(waiting, (buckets[number].needed, number))
        _, number = heapq.heappop(waiting)
        order.append(number)
        now_s += buckets[number].link_s
    return tuple(order)


def timings(
    sizes: Sequence[int], needed: Sequence[int], backward_s: float, bytes_per_s: float
) -> list[BucketTiming]:
    """Timings of buckets in the order in which they fill; a layer's backward takes as long as it has weights."""
    total, done, found = max(1, sum(sizes)), 0, []
    for size, place in zip(sizes, needed, strict=True):
        done += size
        found.append(BucketTiming(backward_s * done / total, size / bytes_per_s, place))
    return found
