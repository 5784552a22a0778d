"""A cluster plan as one HTML page without scripts: tables, pictures, and for every number the formula behind it.
`cumulo plan cluster --report` writes it.

A number is a link: pointing at it shows its formula with numbers in it, following it leads to its row in the table
of all numbers, whose formula links on to the numbers it was made from.
"""

from collections.abc import Iterable
from html import escape

from cumulo.plan.cluster.pictures import fabric_picture, interval_picture, share_picture
from cumulo.plan.cluster.plan import ClusterPlan
from cumulo.plan.cluster.sheet import Figure, Sheet, number

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1d2733}
h1{font-size:1.6rem}h2{margin-top:2.2rem;border-bottom:1px solid #ccd}
table{border-collapse:collapse;width:100%;margin:.6rem 0}
th,td{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #e3e6ec;vertical-align:top}
td.r,th.r{text-align:right}
a.n{color:inherit;text-decoration:underline dotted #7a8;text-underline-offset:3px;white-space:nowrap}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.8rem}
.cards div{background:#f1f5fa;border-radius:8px;padding:.6rem .8rem}
.cards b{display:block;font-size:1.2rem}.cards a.n{white-space:normal}
svg{width:100%;height:auto;font:12px system-ui,sans-serif}code{font-size:.85em}
tr:target{background:#fff3c4}small{color:#556}
"""


_CAVEAT = (
    "A job's mean time to failure is taken as inversely proportional to its nodes. Meta measured 7.9 h at 1,024 "
    "GPUs where its own rate per node says 28.9 h (Kokolis et al. 2024): small jobs may fail more often than this."
)


def report(plan: ClusterPlan) -> str:
    goal, sheet = plan.goal, plan.sheet
    title = f"{goal.model_name} on {goal.cluster.gpus:,} × {goal.cluster.device.name}"
    body = "".join(
        (
            f"<h1>{escape(title)}</h1>",
            "<p>Point at a number to see how it was worked out; follow it for all of its inputs.</p>",
            _cards(
                sheet,
                "goodput_tok_s",
                "days",
                "ettr_simulated",
                "mfu",
                "mttf_h",
                "cost_trillion",
                "facility_w",
            ),
            _layout(plan),
            _fabric(plan),
            _storage(plan),
            _failures(plan),
            _money(plan),
            _every_number(sheet),
        )
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _layout(plan: ClusterPlan) -> str:
    sheet, job, estimate = plan.sheet, plan.training.job, plan.training.estimate
    rows = _rows(
        sheet, "job_gpus", "nodes_beside_job", "further_jobs", "batch", "sequence", "step_s", "step_low_s",
        "step_high_s", "tokens_per_step", "training_tok_s", "mfu",
    )  # fmt: skip
    low, high = estimate.interval.low, estimate.interval.high
    evidence = "".join(f"<li>{escape(sentence)}</li>" for sentence in estimate.evidence)
    recompute = "nothing" if job.recompute == "none" else job.recompute
    return (
        f"<h2>Layout</h2><p><b>{escape(str(job.layout))}</b>, micro-batches of {job.micro_batch}, "
        f"{job.micro_batches} of them in a step, recomputing {recompute}. A step is expected within "
        f"{low:.3g}–{high:.3g} s "
        f"({estimate.interval.level:.0%}).</p>{_table(('', ''), rows)}"
        f"{share_picture('Time of a step', estimate.breakdown)}<ul>{evidence}</ul>"
    )


def _fabric(plan: ClusterPlan) -> str:
    sheet = plan.sheet
    tiers = [
        (
            escape(count.tier.name),
            _link(sheet, f"{count.key}_switches"),
            _link(sheet, f"{count.key}_cables"),
            _link(sheet, f"{count.key}_bytes_per_s"),
            f"{count.tier.nodes:,}",
            f"{count.tier.oversubscription:g} : 1",
        )
        for count in plan.tiers
    ]
    traffic = [
        (
            f"{line.axis} {line.ranks:,}",
            f"{line.stride:,}",
            escape(line.where),
            _link(sheet, f"{line.axis}_bytes"),
            _link(sheet, f"{line.axis}_share"),
        )
        for line in plan.traffic
    ]
    fabrics = [
        (
            escape(choice.name),
            *(_link(sheet, f"{choice.key}_{what}") for what in ("step_s", "slower", "switches", "cables")),
        )
        for choice in plan.fabrics
    ]
    tier_heads = ("tier", "switches", "cables down", "each way", "reaches nodes", "oversubscribed above")
    fabric_heads = ("fabric, oversubscription", "time of a step", "against this plan", "switches", "cables")
    traffic_heads = (
        "traffic",
        "GPUs apart",
        "goes over",
        "a GPU sends in a step",
        "load of its links or card",
    )
    return (
        f"<h2>Fabric: {escape(plan.goal.cluster.fabric.name)}</h2>"
        f"{fabric_picture(plan.goal.cluster, plan.tiers)}{_table(tier_heads, tiers)}"
        f"{_table(('', ''), _rows(sheet, 'switches', 'cables', 'network_w'))}"
        f"<h3>Where traffic goes</h3>{_table(traffic_heads, traffic)}"
        f"<h3>The same job on other fabrics of these switches</h3>{_table(fabric_heads, fabrics)}"
    )


def _storage(plan: ClusterPlan) -> str:
    names = (
        "checkpoint_bytes", "shard_bytes", "copy_s", "send_s", "write_s", "write_behind", "write_for_stall",
        "read_bytes_per_s",
    )  # fmt: skip
    return f"<h2>Storage</h2>{_table(('', ''), _rows(plan.sheet, *names))}"


def _failures(plan: ClusterPlan) -> str:
    sheet, outcome = plan.sheet, plan.outcome
    tiers = [
        (
            escape(tier.name),
            f"{_link(sheet, tier.stall)} {escape(tier.what)}",
            _link(sheet, f"interval_{tier.key}_s"),
            _link(sheet, f"restart_{tier.key}_s"),
            _link(sheet, f"ettr_{tier.key}"),
        )
        for tier in plan.checkpoints
    ]
    heads = (
        "checkpoints in",
        "stop training for",
        "best interval",
        "failure to training",
        "share that trains",
    )
    shares = (
        ("trains", outcome.ettr),
        ("trains again", outcome.lost),
        ("checkpoints", outcome.checkpoints),
        ("restarts", outcome.restarts),
        ("waits for a repair", outcome.no_spare),
    )
    sweeps = [(tier.name, plan.sweeps[tier.key]) for tier in plan.checkpoints]
    names = ("mttf_h", "failures_in_run", "in_repair", "spare_nodes", "ettr_formula", "ettr_simulated",
             "ettr_low", "ettr_high", "lost_share", "checkpoint_share", "restart_share", "repair_share",
             "interval_simulated_s", "both_lost_share")  # fmt: skip
    return (
        f"<h2>Failures</h2>{_table(('', ''), _rows(sheet, *names))}"
        f"<p>{escape(_CAVEAT)}</p>"
        f"{_table(heads, tiers)}<h3>Where time goes ({escape(plan.checkpoints[0].name)})</h3>"
        f"{share_picture('Where time goes', shares)}{interval_picture(sweeps)}"
        f"<h3>What one change would add to the goodput</h3>{_table(('', ''), _rows(sheet, *plan.gains))}"
    )


def _money(plan: ClusterPlan) -> str:
    names = ("machines_w", "facility_w", "energy_mwh", "goodput_tok_s", "days", "cost_trillion", "cost_run")
    return f"<h2>Power and money</h2>{_table(('', ''), _rows(plan.sheet, *names))}"


def _every_number(sheet: Sheet) -> str:
    rows = []
    for figure in sheet.figures.values():
        how = escape(figure.source)
        if figure.formula:
            inputs = ", ".join(_link(sheet, name, name) for name in figure.inputs)
            how = f"<code>{escape(sheet.shown(figure.name))}</code>"
            how += f"<br><code>= {escape(sheet.inserted(figure.name))}</code>"
            how += f"<br><small>from {inputs}{'. ' + escape(figure.source) if figure.source else ''}</small>"
        rows.append(
            f'<tr id="{figure.name}"><td><code>{figure.name}</code></td><td>{escape(figure.label)}</td>'
            f'<td class="r">{escape(value(figure))}</td><td>{how}</td></tr>'
        )
    head = '<tr><th>name</th><th></th><th class="r">value</th><th>how</th></tr>'
    return f'<h2 id="numbers">Every number</h2><table>{head}{"".join(rows)}</table>'


def _cards(sheet: Sheet, *names: str) -> str:
    cards = "".join(
        f"<div><b>{_link(sheet, name)}</b>{escape(sheet.figures[name].label)}</div>" for name in names
    )
    return f'<div class="cards">{cards}</div>'


def _rows(sheet: Sheet, *names: str) -> list[tuple[str, str]]:
    return [(escape(sheet.figures[name].label), _link(sheet, name)) for name in names]


def _link(sheet: Sheet, name: str, text: str | None = None) -> str:
    figure = sheet.figures[name]
    how = f"{sheet.shown(name)} = {sheet.inserted(name)}" if figure.formula else figure.source
    hint = f"{name} = {how}"
    return f'<a class="n" href="#{name}" title="{escape(hint)}">{escape(text or value(figure))}</a>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(heads)
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>" if any(names) else ""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


_PREFIXES = (
    (1e12, "T", "trillion "),
    (1e9, "G", "billion "),
    (1e6, "M", "million "),
)


def value(figure: Figure) -> str:
    """A figure as people read it: percent, MW, TB, minutes."""
    amount, unit = figure.value, figure.unit.replace("bytes", "B")
    if unit == "share":
        return f"{amount:.2%}" if amount >= 1e-4 or amount == 0 else f"{amount:.1e}"
    if unit == "s" and (amount >= 600 or 0 < amount < 0.1):
        return f"{number(amount / 60)} min" if amount >= 600 else f"{number(amount * 1e3)} ms"
    if unit == "h" and 0 < amount < 1:
        return f"{number(amount * 60)} min"
    if unit == "GB/s":
        amount, unit = amount * 1e9, "B/s"
    if unit in ("W", "B", "B/s", "tokens", "tokens/s", "USD"):
        for factor, prefix, word in _PREFIXES:
            if amount >= factor:
                return (
                    f"{number(float(f'{amount / factor:.4g}'))} {prefix if unit[0] in 'WB' else word}{unit}"
                )
    return f"{number(amount)} {unit}".strip()
