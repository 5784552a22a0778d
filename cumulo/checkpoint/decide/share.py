"""Who stores what: each box of a state once, spread evenly over the ranks that have it. Pure; for `held.py`.

Every holder finds out its own share by itself, so that nothing must be agreed upon before a save.
"""

import math
import zlib
from collections.abc import Sequence

from cumulo.layout.box import Box, cut_rows

LEAST_BYTES = 1 << 20  # of a box that is worth cutting: below, more pieces cost more than an uneven share


def share(name: str, boxes: Sequence[Box], holders: Sequence[int], rank: int, item_bytes: int) -> list[Box]:
    """The boxes, or rows of them, that `rank` stores; over all holders they are `boxes`, each element once."""
    place, count = list(holders).index(rank), len(holders)
    found: list[Box] = []
    for box in boxes:
        large = bool(box.size) and box.size[0] >= count and math.prod(box.size) * item_bytes >= LEAST_BYTES
        if count > 1 and large:
            first, rows = box.at[0], box.size[0]
            begin, end = first + rows * place // count, first + rows * (place + 1) // count
            found += [_moved(part, begin) for part in cut_rows([box], begin, end)]
        elif zlib.crc32(f"{name}{box.offset}".encode()) % count == place:
            found.append(box)
    return found


def _moved(box: Box, rows: int) -> Box:
    """`cut_rows` counts from the first row it keeps; the tensor is still the whole one."""
    return Box(box.offset, box.size, (box.at[0] + rows, *box.at[1:]))
