"""A cluster plan as one HTML page without scripts: tables, pictures, and for every number the formula behind it.
`cumulo plan cluster --report` writes it, from the template data/cluster_report.html.

A number is a link: pointing at it shows its formula with numbers in it, following it leads to its row in the table
of all numbers, whose formula links on to the numbers it was made from.
"""

from collections.abc import Sequence

from jinja2 import Environment
from markupsafe import Markup

from cumulo.base.chart import COLORS, Chart, Series, chart_file
from cumulo.base.quantities import between, percent, quantity
from cumulo.base.strict import package_text
from cumulo.plan.cluster.checkpoints import SweepPoint
from cumulo.plan.cluster.plan import ClusterPlan
from cumulo.plan.cluster.sheet import groups, value, value_range


def report(plan: ClusterPlan) -> str:
    goal, sheet, outcome = plan.goal, plan.sheet, plan.outcome
    interval = plan.training.estimate.interval
    nodes = {"this job": sheet["job_nodes"], "further jobs": sheet["further_jobs"] * sheet["job_nodes"]}
    if plan.inference is not None:
        nodes["inference"] = sheet["inference_nodes"]
    nodes |= {"spares": sheet["spare_nodes"], "idle": sheet["idle_nodes"]}
    times = (
        ("trains", outcome.ettr),
        ("trains again", outcome.lost),
        ("checkpoints", outcome.checkpoints),
        ("restarts", outcome.restarts),
        ("waits for a repair", outcome.no_spare),
    )

    def link(name: str, text: str = "") -> Markup:
        figure = sheet.figures[name]
        how = f"{sheet.shown(name)} = {sheet.inserted(name)}" if figure.formula else figure.source
        hint, shown = f"{name} = {how}", text or value(figure)
        mark = Markup(" <small>extrapolated</small>") if figure.extrapolated and not text else ""
        return Markup('<a class="n" href="#{}" title="{}">{}</a>{}').format(name, hint, shown, mark)

    text = package_text("cumulo.plan", "data/cluster_report.html")
    page = Environment(autoescape=True, keep_trailing_newline=True).from_string(text)
    return page.render(
        plan=plan,
        title=f"{goal.model_name} on {goal.cluster.gpus:,} × {goal.cluster.device.name}",
        why=f"{why_so_many(plan)} {budget_verdict(plan)}",
        extrapolations=extrapolations(plan),
        job=plan.training.job,
        estimate=plan.training.estimate,
        step_range=between(interval.low, interval.high, "s"),
        groups=groups(),
        nodes=list(nodes.items()),
        times=times,
        intervals=Markup(interval_picture([(one.name, plan.sweeps[one.key]) for one in plan.checkpoints])),
        colors=COLORS,
        percent=percent,
        label=lambda name: sheet.figures[name].label,
        spread=lambda name: value_range(sheet, name),
        value=value,
        link=link,
    )


def why_so_many(plan: ClusterPlan) -> str:
    """Why the job has the GPUs that it has."""
    sheet = plan.sheet
    if plan.goal.fixed:
        return "The job's layout was given with --fixed."
    if plan.goal.deadline_days is not None:
        deadline = quantity(plan.goal.deadline_days, "days")
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


def extrapolations(plan: ClusterPlan) -> str:
    """Why figures are extrapolated; empty: none is."""
    whys = dict.fromkeys(why for one in plan.sheet.figures.values() for why in one.extrapolated)
    if not whys:
        return ""
    return f"the job has {int(plan.sheet['job_gpus']):,} GPUs, more than were published ({'; '.join(whys)})"


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


def interval_picture(sweeps: Sequence[tuple[str, Sequence[SweepPoint]]]) -> str:
    """Share of time that trains over the interval between checkpoints, for each way to keep them: a line by
    formula, dots simulated, with the range of 90 of 100 runs."""
    series = []
    for color, (name, sweep) in enumerate(sweeps):
        at = [point.interval_s / 60 for point in sweep]
        formula = [(x, 100 * point.by_formula) for x, point in zip(at, sweep, strict=True)]
        simulated = [(x, 100 * point.simulated.ettr) for x, point in zip(at, sweep, strict=True)]
        ranges = [
            (x, 100 * point.simulated.ettr_low, 100 * point.simulated.ettr_high)
            for x, point in zip(at, sweep, strict=True)
        ]
        series.append(Series(f"{name}, by formula", formula, color=color))
        tips = [_told(name, point) for point in sweep]
        series.append(Series(f"{name}, simulated", simulated, "dots", color, tips, ranges))
    title = "Share of time that trains: lines by formula, dots simulated"
    x_label = "training time between two checkpoints, minutes"
    return chart_file(Chart(title, x_label, "share of time, %", series, x_log=True, y_from_zero=False))


def _told(name: str, point: SweepPoint) -> str:
    shares = f"{percent(point.by_formula)} by formula, {percent(point.simulated.ettr)} simulated"
    return f"{name}, every {quantity(point.interval_s, 's')}: {shares}"
