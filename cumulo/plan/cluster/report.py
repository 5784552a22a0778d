"""A cluster plan as one HTML page without scripts: tables, pictures, and for every number the formula behind it.
`cumulo plan cluster --report` writes it.

A number is a link: pointing at it shows its formula with numbers in it, following it leads to its row in the table
of all numbers, whose formula links on to the numbers it was made from.
"""

from collections.abc import Iterable
from html import escape

from cumulo.base import quantities
from cumulo.plan.cluster.pictures import fabric_picture, interval_picture, share_picture
from cumulo.plan.cluster.plan import ClusterPlan
from cumulo.plan.cluster.sheet import Sheet, groups, in_own_unit, value, value_range

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


_FIGURES = ("", "", "90% range")


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
                "ettr",
                "mfu",
                "mttf_h",
                "cost_trillion",
                "facility_w",
            ),
            _division(plan),
            _layout(plan),
            _inference(plan),
            _fabric(plan),
            _storage(plan),
            _failures(plan),
            _around(plan),
            _money(plan),
            _every_number(sheet),
        )
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _division(plan: ClusterPlan) -> str:
    sheet = plan.sheet
    names = ["job_nodes", "further_jobs", "spare_nodes", "idle_nodes"]
    parts = [("this job", sheet["job_nodes"]), ("further jobs", sheet["further_jobs"] * sheet["job_nodes"])]
    if plan.inference is not None:
        names.insert(2, "inference_nodes")
        parts.append(("inference", sheet["inference_nodes"]))
    parts += [("spares", sheet["spare_nodes"]), ("idle", sheet["idle_nodes"])]
    return (
        f"<h2>Who gets the nodes</h2>{share_picture('Who gets the nodes', parts)}"
        f"{_table(_FIGURES, _rows(sheet, *names))}<p><b>Why:</b> {escape(why_so_many(plan))} "
        f"{escape(budget_verdict(plan))}</p>"
    )


def why_so_many(plan: ClusterPlan) -> str:
    """Why the job has the GPUs that it has."""
    sheet = plan.sheet
    if plan.goal.fixed is not None:
        return "The job's layout was given with --fixed."
    if plan.goal.deadline_days is not None:
        deadline = quantities.quantity(plan.goal.deadline_days, "days")
        return f"The job takes as many GPUs as end it within {deadline} at the long end of the range."
    beside = sheet["nodes"] - sheet["spare_nodes"] - sheet["job_nodes"]
    if beside < 0.1 * sheet["nodes"]:
        return "The job takes all nodes but the spares."
    if plan.goal.recovery == "restart" and sheet["ettr"] < 0.75:
        return (
            "A larger job would train less: it fails more often, and setting up its communication takes longer. "
            "With recovery without global rollback (--recovery replica) one job can use more."
        )
    return "The batch has no more sequences to spread over further replicas; a larger --batch can use more nodes."


def budget_verdict(plan: ClusterPlan) -> str:
    """Whether the run is within the budget; empty: none was given."""
    sheet = plan.sheet
    if plan.goal.budget is None:
        return ""
    tokens = (
        f"the budget pays for {value(sheet.figures['budget_tokens'])} ({value_range(sheet, 'budget_tokens')})"
    )
    if sheet["cost_run_high"] <= sheet["budget"]:
        return f"Within the budget, at the expensive end of the range too: {tokens}."
    if sheet["cost_run"] <= sheet["budget"]:
        return f"Probably within the budget, but not surely: {tokens}."
    return f"Over the budget: {tokens}."


def _inference(plan: ClusterPlan) -> str:
    if plan.inference is None:
        return ""
    best, sheet = plan.inference.best, plan.sheet
    rows = _rows(
        sheet, "inference_rate", "inference_tok_s", "users", "inference_replicas", "inference_nodes",
        "replica_rate", "inference_most", "inference_price",
    )  # fmt: skip
    return (
        f"<h2>Inference</h2><p><b>{escape(str(best.replica))}</b>. {escape(best.replica.confidence.evidence)}.</p>"
        f"{_table(_FIGURES, rows)}"
    )


def _around(plan: ClusterPlan) -> str:
    sheet = plan.sheet
    parts = (
        ("Monitoring", groups()["monitoring"]),
        ("Racks and cooling", ("machines_w", "facility_w", *groups()["cooling"])),
        ("Bill of materials of the network", ("cards", "switches", "cables", "transceivers", "network_w")),
    )
    return "".join(f"<h2>{name}</h2>{_table(_FIGURES, _rows(sheet, *figures))}" for name, figures in parts)


def _layout(plan: ClusterPlan) -> str:
    sheet, job, estimate = plan.sheet, plan.training.job, plan.training.estimate
    rows = _rows(
        sheet, "job_gpus", "nodes_beside_job", "batch", "sequence", "step_s", "tokens_per_step",
        "training_tok_s", "mfu",
    )  # fmt: skip
    low, high = estimate.interval.low, estimate.interval.high
    evidence = "".join(f"<li>{escape(sentence)}</li>" for sentence in estimate.evidence)
    recompute = "nothing" if job.recompute == "none" else job.recompute
    return (
        f"<h2>Layout</h2><p><b>{escape(str(job.layout))}</b>, {job.micro_batches:,} micro-batches of "
        f"{job.micro_batch} sequences in a step, recomputing {recompute}. A step is expected within "
        f"{quantities.between(low, high, 's')} "
        f"({estimate.interval.level:.0%}).</p>{_table(_FIGURES, rows)}"
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
        f"{_table(_FIGURES, _rows(sheet, 'switches', 'cables', 'network_w'))}"
        f"<h3>Where traffic goes</h3>{_table(traffic_heads, traffic)}"
        f"<h3>The same job on other fabrics of these switches</h3>{_table(fabric_heads, fabrics)}"
    )


def _storage(plan: ClusterPlan) -> str:
    names = (
        "checkpoint_bytes", "shard_bytes", "copy_s", "send_s", "write_s", "write_behind", "write_for_stall",
        "read_bytes_per_s", *groups()["storage"],
    )  # fmt: skip
    return f"<h2>Storage</h2>{_table(_FIGURES, _rows(plan.sheet, *names))}"


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
             "ettr_simulated_low", "ettr_simulated_high", "lost_share", "checkpoint_share", "restart_share",
             "repair_share", "interval_simulated_s", "both_lost_share")  # fmt: skip
    return (
        f"<h2>Failures</h2>{_table(_FIGURES, _rows(sheet, *names))}"
        f"<p>{escape(_CAVEAT)}</p>"
        f"{_table(heads, tiers)}<h3>Where time goes ({escape(plan.checkpoints[0].name)})</h3>"
        f"{share_picture('Where time goes', shares)}{interval_picture(sweeps)}"
        f"<h3>After a failure</h3>{_recoveries(plan)}"
        f"<h3>What one change would add to the goodput</h3>{_table(_FIGURES, _rows(sheet, *plan.gains))}"
    )


def _recoveries(plan: ClusterPlan) -> str:
    sheet = plan.sheet
    rows = [
        (
            escape(one.name),
            escape(one.what),
            *(_link(sheet, name) for name in (f"pause_{one.key}_s", f"ettr_{one.key}", f"goodput_{one.key}")),
        )
        for one in plan.recoveries
    ]
    return _table(("alternative", "what happens", "pause", "share that trains", "goodput"), rows)


def _money(plan: ClusterPlan) -> str:
    names = ("charged_gpus", "facility_w", "energy_mwh", "goodput_tok_s", "days", "cost_trillion", "cost_run")
    return f"<h2>Power and money</h2>{_table(_FIGURES, _rows(plan.sheet, *names))}"


def _every_number(sheet: Sheet) -> str:
    rows = []
    for figure in sheet.figures.values():
        how = escape(figure.source)
        if figure.formula:
            inputs = ", ".join(_link(sheet, name, name) for name in figure.inputs)
            how = f"<code>{escape(sheet.shown(figure.name))}</code>"
            how += f"<br><code>= {escape(sheet.inserted(figure.name, in_own_unit))}</code>"
            how += f"<br><small>from {inputs}{'. ' + escape(figure.source) if figure.source else ''}</small>"
        rows.append(
            f'<tr id="{figure.name}"><td><code>{figure.name}</code></td><td>{escape(figure.label)}</td>'
            f'<td class="r">{escape(value(figure))}</td><td>{how}</td></tr>'
        )
    head = '<tr><th>name</th><th></th><th class="r">value</th><th>how</th></tr>'
    return f'<h2 id="numbers">Every number</h2><table>{head}{"".join(rows)}</table>'


def _cards(sheet: Sheet, *names: str) -> str:
    cards = "".join(
        f"<div><b>{_link(sheet, name)}</b>{escape(sheet.figures[name].label)}{_card_range(sheet, name)}</div>"
        for name in names
    )
    return f'<div class="cards">{cards}</div>'


def _card_range(sheet: Sheet, name: str) -> str:
    ends = value_range(sheet, name)
    return f"<br><small>90% range: {escape(ends)}</small>" if ends else ""


def _rows(sheet: Sheet, *names: str) -> list[tuple[str, ...]]:
    return [
        (escape(sheet.figures[name].label), _link(sheet, name), escape(value_range(sheet, name)))
        for name in names
    ]


def _link(sheet: Sheet, name: str, text: str | None = None) -> str:
    figure = sheet.figures[name]
    how = f"{sheet.shown(name)} = {sheet.inserted(name, in_own_unit)}" if figure.formula else figure.source
    hint = f"{name} = {how}"
    return f'<a class="n" href="#{name}" title="{escape(hint)}">{escape(text or value(figure))}</a>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(heads)
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>" if any(names) else ""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{head}{body}</table>"
