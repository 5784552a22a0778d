"""Charts of the live page as SVG text: throughput, steps and the map of the KV blocks. Colours are in style.css."""

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape

from cumulo.console.words import short_id
from cumulo.serve.messages import BlockMap, StepRecord

_WIDTH, _HEIGHT = 480, 110
_MAP_COLUMNS, _MOST_CELLS = 64, 1536
_INKS = 8  # owners' colours; they repeat beyond
_NAMED_OWNERS = 8


def throughput_chart(history: Sequence[tuple[int, int]]) -> str:
    """Stacked columns, one per second: decode below, prefill above."""
    most = max((prefill + decode for prefill, decode in history), default=0)
    return _peak(f"at most {most:,} in a second") + _stacked(history) + _legend()


def steps_chart(steps: Sequence[StepRecord]) -> str:
    """One column per step: how many tokens, of prompts and of answers; how long it took in its title."""
    pairs = [(step.prefill_tokens, step.decode_tokens) for step in steps]
    titles = [
        f"step {s.index}: {s.prefill_tokens} prefill, {s.decode_tokens} decode tokens, "
        f"{(s.finished_s - s.started_s) * 1e3:.1f} ms"
        for s in steps
    ]
    most = max((sum(pair) for pair in pairs), default=0)
    return _peak(f"at most {most:,} tokens in a step") + _stacked(pairs, titles) + _legend()


def _peak(words: str) -> str:
    return f'<div class="peak">{words}</div>'


def _stacked(pairs: Sequence[tuple[int, int]], titles: Sequence[str] = ()) -> str:
    most = max((prefill + decode for prefill, decode in pairs), default=0) or 1
    width, space = _WIDTH / max(1, len(pairs)), _HEIGHT - 8
    columns = []
    for index, (prefill, decode) in enumerate(pairs):
        foot = float(_HEIGHT - 2)
        title = f"<title>{escape(titles[index])}</title>" if titles else ""
        for ink, tokens in (("decode", decode), ("prefill", prefill)):
            if tokens:
                height = max(1.0, tokens / most * space)
                foot -= height
                columns.append(
                    f'<rect class="ink-{ink}" x="{index * width:.1f}" y="{foot:.1f}" '
                    f'width="{max(0.5, width - 1):.1f}" height="{height:.1f}">{title}</rect>'
                )
    ground = f'<path d="M0 {_HEIGHT - 1.5}H{_WIDTH}" stroke="var(--line)"/>'
    return f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}">{ground}{"".join(columns)}</svg>'


def _legend() -> str:
    return (
        '<div class="legend"><span><i class="ink-decode"></i>decode</span>'
        '<span><i class="ink-prefill"></i>prefill</span></div>'
    )


def block_chart(blocks: BlockMap, may_see: Callable[[str], bool]) -> str:
    """A cell per block, or per few blocks where there are many; owners that may not be seen keep their names."""
    total = len(blocks.owner_of)
    per_cell = max(1, -(-total // _MOST_CELLS))
    inks = [
        _cell_ink(blocks.owner_of[start : start + per_cell], blocks.cached[start : start + per_cell])
        for start in range(0, total, per_cell)
    ]
    rows = -(-len(inks) // _MAP_COLUMNS)
    cells = "".join(
        f'<rect class="ink-{ink}" x="{start % _MAP_COLUMNS}" y="{start // _MAP_COLUMNS}" '
        f'width="{length}" height="1"/>'
        for ink, start, length in _runs(inks)
    )
    grid = "".join(f"M{column} 0V{rows}" for column in range(_MAP_COLUMNS + 1))
    grid += "".join(f"M0 {row}H{_MAP_COLUMNS}" for row in range(rows + 1))
    held = Counter(owner for owner in blocks.owner_of if owner >= 0)
    names = "".join(
        f'<span><i class="ink-{owner % _INKS}"></i>{_owner(blocks.owners[owner], may_see)} ({count})</span>'
        for owner, count in held.most_common(_NAMED_OWNERS)
    )
    if len(held) > _NAMED_OWNERS:
        names += f"<span>and {len(held) - _NAMED_OWNERS} more</span>"
    free_cached = sum(
        1 for owner, kept in zip(blocks.owner_of, blocks.cached, strict=True) if owner < 0 and kept
    )
    free = total - sum(held.values()) - free_cached
    size = "a block" if per_cell == 1 else f"{per_cell} blocks"
    return (
        f'<svg class="chart" viewBox="0 0 {_MAP_COLUMNS} {rows}">{cells}'
        f'<path d="{grid}" stroke="var(--card)" stroke-width=".14"/></svg><div class="legend">'
        f'<span><i class="ink-cached"></i>cached, reusable ({free_cached:,})</span>'
        f'<span><i class="ink-free"></i>free ({free:,})</span>{names}<span>a cell is {size}</span></div>'
    )


def _cell_ink(owners: Sequence[int], cached: bytes) -> str:
    """The owner if there is one, else whether something cached is there."""
    owner = max(owners)
    return str(owner % _INKS) if owner >= 0 else "cached" if any(cached) else "free"


def _runs(inks: Sequence[str]) -> list[tuple[str, int, int]]:
    """Equal cells beside each other in a row are one rectangle: an idle cache is a short drawing."""
    runs: list[tuple[str, int, int]] = []
    for index, ink in enumerate(inks):
        if runs and index % _MAP_COLUMNS and ink == runs[-1][0]:
            runs[-1] = ink, runs[-1][1], runs[-1][2] + 1
        else:
            runs.append((ink, index, 1))
    return runs


def _owner(request_id: str, may_see: Callable[[str], bool]) -> str:
    if not may_see(request_id):
        return "someone else"
    return f'<a href="/requests/{escape(request_id)}">{escape(short_id(request_id, 8))}</a>'
