"""The fleet page's table of ranks: the processes that one engine is spread over, as HTML."""

from collections.abc import Mapping, Sequence
from html import escape

from cumulo.console.words import milliseconds
from cumulo.ranks.rank_meter import RankState

_COLUMNS = (  # name, tooltip
    ("rank", "Its engine and number; rank 0 is the engine's own process."),
    ("process", "The id of its process."),
    ("memory", "Memory of the process, or what it holds on its GPU."),
    ("steps", "Steps that it played since it started."),
    ("step", "Mean time of a step, with what it waited."),
    (
        "waiting",
        "Share of that time in which it waited for other ranks. The rank that waits least is the slowest.",
    ),
)


def ranks_html(engines: Mapping[str, Sequence[RankState]]) -> str:
    """Empty where every engine is one process."""
    rows = "".join(_row(name, one) for name, ranks in engines.items() for one in ranks)
    if not rows:
        return ""
    head = "".join(
        f'<th class="{"right" if at else ""}" title="{tip}">{name}</th>'
        for at, (name, tip) in enumerate(_COLUMNS)
    )
    return (
        '<h2 title="Processes that share one copy of the model: --tp, --pp, --dp and --ep.">Ranks</h2>'
        f'<table class="plain fleet"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _row(engine: str, one: RankState) -> str:
    step_s = one.step_s / one.steps if one.steps else None
    waiting = f"{100 * one.wait_s / one.step_s:.0f}%" if one.step_s else "–"
    cells = (
        str(one.pid),
        f"{one.memory_bytes / (1 << 30):.2f} GiB",
        f"{one.steps:,}",
        milliseconds(step_s),
        waiting,
    )
    numbers = "".join(f'<td class="right num">{cell}</td>' for cell in cells)
    return f"<tr><td><b>{escape(engine)}</b> rank {one.rank}</td>{numbers}</tr>"
