"""Random numbers as a function of (seed, sample, position). Called by the sampler, one number per token.

There is no generator with a state to save: the number a token is drawn with is computed from the request's
seed, which of its samples this is, and the token's position. So neither batch mates, nor chunking, nor a
preemption that computes the sequence again can change it.
"""

import numpy as np
from numpy.typing import NDArray

# SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"): the increment is
# 2^64 / golden ratio, the multipliers of the finaliser are Stafford's variant 13.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SEED_MASK = (1 << 64) - 1


def seed_bits(seed: int) -> np.uint64:
    """A seed of any size or sign as the 64 bits that are used of it."""
    return np.uint64(seed & _SEED_MASK)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function: a bijection of 64 bits in which every input bit flips half the output."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER_2
    return values ^ (values >> np.uint64(31))


def uniform(
    seeds: NDArray[np.uint64], sample_indices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One number in [0, 1) per element: three chained rounds, one for each coordinate.

    h = mix(seed + g); h = mix(h + (sample + 1) g); h = mix(h + (position + 1) g), all modulo 2^64; the upper
    53 bits of h are the number, so every value is an exact multiple of 2^-53.
    """
    state = mix(_whole(seeds) + _GOLDEN)
    state = mix(state + (_whole(sample_indices) + np.uint64(1)) * _GOLDEN)
    state = mix(state + (_whole(positions) + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _whole(values: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """As an array even for one element: numpy wraps arrays silently around 2^64 and warns about scalars."""
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)
