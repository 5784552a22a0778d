"""In which precision ranks exchange partial sums, and how many bytes those take. RankSlice and RankRows ask.

Partial sums of small steps, where bytes are cheap, stay in float32: the sum is then rounded once, as one rank's
product is, and the ranks together say what one says but for the order of additions.
"""

import torch

_FLOAT32_ROWS = 512


def partial_dtype(rows: int, dtype: torch.dtype, invariant: bool) -> torch.dtype:
    """`invariant`: a sum's bits do not depend on how many rows there are."""
    return torch.float32 if invariant or rows <= _FLOAT32_ROWS else dtype


def partial_bytes(hidden: int, max_rows: int, dtype: torch.dtype, invariant: bool) -> int:
    """Of up to so many rows, whichever precision they have."""
    if invariant:
        return 4 * hidden * max_rows
    return hidden * max(4 * min(max_rows, _FLOAT32_ROWS), dtype.itemsize * max_rows)
