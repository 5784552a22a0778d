"""The Grafana dashboard, made of panels.py with Grafana's own builders. Run it after changing a panel:

    pip install -e '.[dashboards]' && python -m cumulo.serve.monitoring.dashboard

rewrites dashboard.json and training.json beside this file, which users import. Nothing else needs the builders.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, stat, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from cumulo.serve.monitoring.panel import Number, Panel, Query, Section
from cumulo.serve.monitoring.panels import SECTIONS
from cumulo.serve.monitoring.training_panels import TRAINING

FILE = Path(__file__).with_name("dashboard.json")
TRAINING_FILE = Path(__file__).with_name("training.json")
_WIDTH = 24  # of Grafana's grid
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def _target(query: Query, letter: str) -> Dataquery:
    target = Dataquery().expr(query.expression).ref_id(letter).datasource(_SOURCE)
    return target.legend_format(query.legend) if query.legend else target


def _graph(panel: Panel) -> timeseries.Panel:
    graph = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .min(0)
        .span(_WIDTH // 3)
        .height(8)
        .fill_opacity(25 if panel.stacked else 8)
        .line_width(1)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if panel.maximum is not None:
        graph.max(panel.maximum)
    if panel.stacked:
        graph.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        graph.with_target(_target(query, letter))
    return graph


def _number(panel: Number) -> stat.Panel:
    steps = [models.Threshold(value=value, color=colour) for value, colour in panel.colours]
    figure = (
        stat.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(_WIDTH // 6)
        .height(4)
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(panel.query, "A"))
    )
    if panel.words:
        results = {value: models.ValueMappingResult(text=word) for value, word in panel.words}
        figure.mappings([models.ValueMap(options=results)])
    return figure


def _choice(name: str, label: str, metric: str = "engine_up") -> dashboard.QueryVariable:
    """A variable filled with the label's values; all of them at first."""
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .query(f"label_values(cumulo:{metric}, {label})")
        .datasource(_SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def build() -> str:
    """The dashboard as JSON text."""
    made = _empty(
        "Cumulo", "cumulo-serve", "One or more `cumulo serve`: health, traffic, latency, memory.", "now-30m"
    )
    made.with_variable(_choice("model", "model_name")).with_variable(_choice("instance", "instance"))
    return _filled(made, SECTIONS)


def build_training() -> str:
    """The dashboard of training runs."""
    about = "Training runs: loss, speed, and their collectives next to the cost model."
    made = _empty("Cumulo training", "cumulo-train", about, "now-1h")
    made.with_variable(_choice("run", "run", "train_step"))
    return _filled(made, (TRAINING,))


def _empty(title: str, uid: str, about: str, since: str) -> dashboard.Dashboard:
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["cumulo", "llm"])
        .refresh("10s")
        .time(since, "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )


def _filled(made: dashboard.Dashboard, sections: Sequence[Section]) -> str:
    numbers = itertools.count(1)
    for section in sections:
        made.with_row(dashboard.Row(section.title).id(next(numbers)))
        for panel in section.panels:
            drawn = _number(panel) if isinstance(panel, Number) else _graph(panel)
            made.with_panel(drawn.id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


if __name__ == "__main__":
    FILE.write_text(build())
    TRAINING_FILE.write_text(build_training())
