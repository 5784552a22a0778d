"""What the processes of `cumulo bench overlap` train on: random tokens."""

import numpy as np

from cumulo.train.data.packing import Batch

LENGTH = 128  # of a sequence


def random_batch(place: int, rows: int, vocab_size: int) -> Batch:
    """Of one process: `rows` sequences of its own."""
    tokens = np.random.default_rng(place).integers(0, vocab_size, (rows, LENGTH + 1))
    positions = np.broadcast_to(np.arange(LENGTH), (rows, LENGTH)).copy()
    starts = np.arange(0, (rows + 1) * LENGTH, LENGTH, dtype=np.int32)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), positions, starts, rows * LENGTH)
