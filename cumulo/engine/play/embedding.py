"""What is done to a pooled vector before it is an embedding. Called by the engine, LLM.embed and the server."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def normalised(vector: Vector) -> Vector:
    """At length 1 (L2). A vector of zeros has no direction and stays."""
    largest = float(np.abs(vector).max(initial=0.0))
    if largest == 0:
        return vector
    scaled = vector / largest  # squares of what is near 1 neither overflow nor vanish
    unit: Vector = scaled / np.sqrt(scaled @ scaled)
    return unit


def shortened(vector: Sequence[float] | NDArray[Any], dimensions: int) -> Vector:
    """The first `dimensions` numbers, at length 1 again."""
    return normalised(np.asarray(vector[:dimensions], dtype=np.float64))
