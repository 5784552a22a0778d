"""How evenly something is shared, as one number. The engine and the simulators of clusters and networks show it."""

from collections.abc import Sequence


def jain_index(shares: Sequence[float]) -> float:
    """(sum of x)² / (n * sum of x²), of Jain, Chiu and Hawe 1984: 1 is even, 1/n is all for one of n. Also 1 for
    nobody and for nothing."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares > 0 else 1.0
