"""The map of the KV cache as SVG text: who holds which block. For the live page."""

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape

from cumulo.base import svg
from cumulo.console.values import short_id
from cumulo.serve.engine_link.messages import BlockMap

_MOST_CELLS = 1536
_FEWEST_COLUMNS, _MOST_COLUMNS = 56, 80
_INKS = 8  # owners' colours; they repeat beyond
_NAMED_OWNERS = 8


def block_chart(blocks: BlockMap, may_see: Callable[[str], bool]) -> str:
    """A cell per block, or per few blocks where there are many; owners that may not be seen keep their names."""
    total = len(blocks.owner_of)
    per_cell = max(1, -(-total // _MOST_CELLS))
    inks = [
        _cell_ink(blocks.owner_of[start : start + per_cell], blocks.cached[start : start + per_cell])
        for start in range(0, total, per_cell)
    ]
    columns = columns_for(len(inks))
    rows = -(-len(inks) // columns)
    cells = "".join(
        f'<rect class="ink-{ink}" x="{start % columns}" y="{start // columns}" width="{length}" height="1"/>'
        for ink, start, length in _runs(inks, columns)
    )
    grid = "".join(f"M{column} 0V{rows}" for column in range(columns + 1))
    grid += "".join(f"M0 {row}H{columns}" for row in range(rows + 1))
    lines = svg.tag("path", d=grid, stroke="var(--card)", stroke_width=".14")
    held = Counter(owner for owner in blocks.owner_of if owner >= 0)
    names = "".join(
        f'<span><i class="ink-{owner % _INKS}"></i>{_owner(blocks.owners[owner], may_see)} ({count:,})</span>'
        for owner, count in held.most_common(_NAMED_OWNERS)
    )
    if len(held) > _NAMED_OWNERS:
        names += f"<span>and {len(held) - _NAMED_OWNERS} more requests</span>"
    free_cached = sum(
        1 for owner, kept in zip(blocks.owner_of, blocks.cached, strict=True) if owner < 0 and kept
    )
    free = total - sum(held.values()) - free_cached
    size = "1 block" if per_cell == 1 else f"{per_cell} blocks"
    return (
        svg.picture(columns, rows, cells, lines, class_="chart") + '<div class="legend">'
        f'<span title="Free blocks that still hold a prefix which a later request can share">'
        f'<i class="ink-cached"></i>cached, reusable ({free_cached:,})</span>'
        f'<span><i class="ink-free"></i>free ({free:,})</span>{names}<span>1 cell = {size}</span></div>'
    )


def columns_for(cells: int) -> int:
    """As many columns as leave the last row full, or nearly so."""
    if cells <= _FEWEST_COLUMNS:
        return max(1, cells)
    return min(range(_MOST_COLUMNS, _FEWEST_COLUMNS - 1, -1), key=lambda columns: -cells % columns)


def _cell_ink(owners: Sequence[int], cached: bytes) -> str:
    """The owner if there is one, else whether something cached is there."""
    owner = max(owners)
    return str(owner % _INKS) if owner >= 0 else "cached" if any(cached) else "free"


def _runs(inks: Sequence[str], columns: int) -> list[tuple[str, int, int]]:
    """Equal cells next to each other in a row are one rectangle: an idle cache is a short drawing."""
    runs: list[tuple[str, int, int]] = []
    for index, ink in enumerate(inks):
        if runs and index % columns and ink == runs[-1][0]:
            runs[-1] = ink, runs[-1][1], runs[-1][2] + 1
        else:
            runs.append((ink, index, 1))
    return runs


def _owner(request_id: str, may_see: Callable[[str], bool]) -> str:
    if not may_see(request_id):
        return "another key"
    return f'<a href="/requests/{escape(request_id)}">{escape(short_id(request_id, 8))}</a>'
