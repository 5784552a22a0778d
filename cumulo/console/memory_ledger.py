"""The memory ledger as HTML: predicted next to measured, part by part. For the live page."""

from html import escape

from cumulo.engine.memory.ledger import format_bytes
from cumulo.serve.engine_link.messages import Ready


def ledger_html(info: Ready) -> str:
    rows = "".join(
        f'<tr><td>{_part(row["name"])}</td><td class="right num">{format_bytes(row["predicted_bytes"])}</td>'
        f'<td class="right num">{_measured(row["measured_bytes"])}</td>'
        f'<td class="right num">{_ratio(row["predicted_bytes"], row["measured_bytes"])}</td>'
        f'<td class="soft small wide-only">{escape(row["how"])}</td></tr>'
        for row in info.ledger["rows"]
    )
    total = info.ledger
    return (
        '<table class="plain"><tr><th>part</th><th class="right">predicted</th><th class="right">measured</th>'
        '<th class="right" title="measured / predicted">ratio</th><th class="wide-only">prediction</th></tr>'
        f'{rows}<tr><td><b>total</b></td><td class="right num"><b>{format_bytes(total["predicted_bytes"])}</b></td>'
        f'<td class="right num"><b>{_measured(total["measured_bytes"])}</b></td><td></td>'
        f'<td class="soft small wide-only">of {format_bytes(total["available_bytes"])} available</td></tr></table>'
    )


def _measured(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)


def _ratio(predicted: int, measured: int | None) -> str:
    return "–" if measured is None or not predicted else f"{measured / predicted:.2f}"


def _part(name: str) -> str:
    return escape(name.replace("kv cache", "KV cache"))
