"""What a GPU is worth where more are wanted than there are: two prices near each other, between which what is
wanted begins to fit. They are found by trial, for all tenants at once."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cumulo.cluster.decide.nodes import Ints

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

SAVES = 1e-9  # a step must save more per GPU: nobody pays less
NEAR = 1.1  # times the lower price
_NO_PRICE = 1e30  # at which nobody wants a GPU
_FIRST = 1.0  # if nobody knows better
_MOST_TRIES = 7  # if the prices are farther apart then, there are more steps to be sorted


class Prices:
    """What a GPU was worth at the last decision, to everybody and within each tenant's limit; 0: nobody knows. The
    next decision begins near it: without, its result is the same after more trials."""

    def __init__(self) -> None:
        self.of_all = 0.0
        self.of_tenant: Floats = np.zeros(0)

    def of_tenants(self, tenants: int) -> Floats:
        known = self.of_tenant[:tenants]
        return np.append(known, np.zeros(tenants - len(known)))

    def learn(self, of_all: float, of_tenant: Floats) -> None:
        if SAVES < of_all < _NO_PRICE:  # else they are enough now, but often only every other time
            self.of_all = of_all
        self.of_tenant = np.where(of_tenant < _NO_PRICE, of_tenant, 0.0)


def price_brackets(
    wanted: Callable[[Floats, Flags], Ints], room: Ints, guess: Floats, least: Floats
) -> tuple[Floats, Floats]:
    """`wanted`: GPUs at prices, of each of some tenants, of the others as few as it likes; `guess`: the last
    prices, 0: unknown. At the first prices that are returned too much is wanted, or they are the least there are;
    at the second ones all fits."""
    low, high = least, np.full(len(room), _NO_PRICE)
    trial = np.where(guess > 0, np.maximum(guess, least), _FIRST)
    factor, wide = np.full(len(room), NEAR), np.ones(len(room), dtype=np.bool_)
    for _ in range(_MOST_TRIES):
        fits = wanted(trial, wide) <= room
        high, low = np.where(fits, trial, high), np.where(fits, low, trial)
        wide = high > NEAR * 1.001 * low
        if not wide.any():
            break
        # Where nothing is known on the other side, it goes on in longer and longer leaps.
        leaps = np.where(fits, low <= least, high >= _NO_PRICE)
        trial = np.where(leaps, np.where(fits, trial / factor, trial * factor), np.sqrt(low * high))
        trial = np.where(wide, np.maximum(trial, least), high)
        factor = np.where(leaps, np.minimum(factor * factor, 1e6), factor)
    return low, high
