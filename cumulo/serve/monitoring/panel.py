"""Panel: what a panel of the dashboard is, and the PromQL that panels are made of. Used by panels.py and by
fleet_panels.py.
"""

from dataclasses import dataclass

CHOSEN = 'model_name=~"$model",instance=~"$instance"'
WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"  # Grafana's name of it
    stacked: bool = False
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """One large figure with its colours: (from this value on, colour), the first value being the lowest."""

    title: str
    description: str
    query: Query
    colours: tuple[tuple[float | None, str], ...]
    unit: str = "short"
    words: tuple[tuple[str, str], ...] = ()  # shown in place of these values


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    panels: tuple[Panel | Number, ...]


def gauge(name: str) -> str:
    return f"cumulo:{name}{{{CHOSEN}}}"


def rate(name: str, by: str = "", window: str = WINDOW) -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate(cumulo:{name}{{{CHOSEN}}}[{window}]))"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', by='le')})"


def percentiles(title: str, histogram: str, description: str) -> Panel:
    queries = tuple(Query(quantile(share, histogram), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))
    return Panel(title, description, queries, unit="s")
