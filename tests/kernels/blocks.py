"""Random AffineBlocks for the kernel tests."""

import numpy as np

from cumulo.kernels.cpu.affine_blocks import AffineBlocks


def random_blocks(
    rows: int,
    columns: int,
    bits: int,
    group: int,
    with_minimum: bool = True,
    half_exact: bool = True,
    seed: int = 0,
    spread: float = 0.01,
) -> AffineBlocks:
    """Codes over their whole range; scales either exact in half precision (as in most files) or not."""
    random = np.random.default_rng(seed)
    low, high, kind = (0, 16, np.uint8) if bits == 4 else (-128, 128, np.int8)
    stored = np.float16 if half_exact else np.float32
    shape = (rows, columns // group)
    scale = random.normal(0, spread, shape).astype(stored).astype(np.float32)
    minimum = random.normal(0, 5 * spread, shape).astype(stored).astype(np.float32) if with_minimum else None
    return AffineBlocks(random.integers(low, high, (rows, columns)).astype(kind), scale, minimum, bits, group)
