"""The fleet page's table of prefill engines, and what each replica has got from them, as HTML."""

from html import escape
from typing import Any

_ENGINES = (  # name, tooltip
    ("prefill engine", "Its name, and the id of its engine process."),
    ("state", "starting, ready or restarting."),
    ("running", "Prompts that it computes now."),
    ("queue", "Prompts that wait there for a place."),
    ("held", "Prompts whose KV blocks it keeps until a replica has copied them."),
    ("restarts", "Times its engine process was replaced after a failure."),
)
_REPLICAS = (
    ("replica", "Its name."),
    ("receiving", "Prompts that prefill engines compute for it now."),
    ("received", "Prompts whose KV blocks arrived since its process began."),
    ("failed", "Prompts that did not arrive and were computed by another engine."),
    ("copy rate", "KV that it copied from prefill engines, for each second of copying."),
)


def prefill_html(engines: list[dict[str, Any]], replicas: list[dict[str, Any]]) -> str:
    """Empty where every replica computes its own prompts."""
    if not engines:
        return ""
    rows = [
        [
            f"<b>{escape(one['name'])}</b> <span class='small soft num'>{one['pid'] or ''}</span>",
            escape(one["state"]),
            f"{one['running']:,}",
            f"{one['waiting']:,}",
            f"{(one['transfers'] or {}).get('sending', 0):,}",
            str(one["restarts"]),
        ]
        for one in engines
    ]
    received = [
        [
            f"<b>{escape(one['name'])}</b>",
            *(f"{(one['transfers'] or {}).get(name, 0):,}" for name in ("receiving", "received", "failed")),
            _rate((one["transfers"] or {}).get("bytes_per_s")),
        ]
        for one in replicas
    ]
    return (
        '<h2 title="Engine processes that compute prompts and hand their KV blocks to the replicas.">'
        f"Prefill engines</h2>{_table(_ENGINES, rows)}{_table(_REPLICAS, received)}"
    )


def _table(columns: tuple[tuple[str, str], ...], rows: list[list[str]]) -> str:
    head = "".join(
        f'<th class="{"right" if at else ""}" title="{tip}">{name}</th>'
        for at, (name, tip) in enumerate(columns)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{"right num" if at else ""}">{cell}</td>' for at, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<table class="plain fleet"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _rate(bytes_per_s: float | None) -> str:
    return "–" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3g} GB/s"
