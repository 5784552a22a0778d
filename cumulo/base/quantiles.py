"""Which value a percentile is. Whoever summarises numbers calls one of two rules, and there is no third:

quantile     between two values where the share lies between them: for figures that are compared with other
             tools' (numpy's default; Hyndman and Fan 1996, definition 7)
percentile   a value that occurred: for the latencies of requests that somebody made

`jain_index` says in one number how evenly something is shared.
"""

import math
from collections.abc import Sequence


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of ordered numbers, at least one, with linear interpolation."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def jain_index(shares: Sequence[float]) -> float:
    """(sum of x)² / (n * sum of x²), of Jain, Chiu and Hawe 1984: 1 is even, 1/n is all for one of n. Also 1 for
    nobody and for nothing."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares > 0 else 1.0
