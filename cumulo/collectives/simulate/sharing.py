"""Max-min fair rates: what messages get of the links they share. The player asks for them at every change.

Water filling (Bertsekas and Gallager 1992, section 6.5.2), many links at a time: a link is decided as soon
as none of its messages has a narrower link elsewhere, which is exact and takes few rounds where the
classic form takes one for each link.
"""

import numpy as np
from numpy.typing import NDArray

from cumulo.collectives.simulate.fabrics.links import Floats, Ints

_CLOSE = 1 + 1e-12


def max_min(
    paths: Ints, capacity: Floats, most: Floats | None = None, weight: Floats | None = None
) -> Floats:
    """Bytes/s of each message. `paths`: a row of links each, padded with -1. `most`: what a message can
    send at best. `weight`: how many messages a row stands for; its rate is that of one of them."""
    messages = len(paths)
    rates = np.full(messages, np.inf) if most is None else most.astype(float).copy()
    used, flat = np.unique(paths, return_inverse=True)
    links = flat.reshape(paths.shape)
    left = np.where(used < 0, np.inf, capacity[used])
    rows, _ = np.nonzero(paths >= 0)
    inside = paths.ravel() >= 0
    entries = flat.ravel()[inside]
    order = np.argsort(entries, kind="stable")
    entries, rows = entries[order], rows[order]
    if not len(entries):
        return rates
    starts = np.flatnonzero(np.r_[True, entries[1:] != entries[:-1]])
    touched = entries[starts]
    weights = np.ones(messages) if weight is None else weight
    open_: NDArray[np.bool_] = np.ones(messages, bool)
    open_[~(paths >= 0).any(axis=1)] = False
    caps = rates.copy()
    while open_.any():
        share = np.full(len(used), np.inf)
        users = np.bincount(entries, np.where(open_, weights, 0.0)[rows], len(used))
        busy = users > 0
        share[busy] = np.maximum(left[busy], 0.0) / users[busy]
        narrowest = np.where(open_, np.minimum(share[links].min(axis=1), caps), np.inf)
        lowest = np.full(len(used), np.inf)
        lowest[touched] = np.minimum.reduceat(narrowest[rows], starts)
        decided_links = busy & (lowest * _CLOSE >= share)
        decided = open_ & ((decided_links[links] & (share[links] <= narrowest[:, None] * _CLOSE)).any(axis=1))
        decided |= open_ & (narrowest >= caps)
        rates[decided] = narrowest[decided]
        left -= np.bincount(entries, np.where(decided, rates * weights, 0.0)[rows], len(used))
        open_ &= ~decided
    return rates
