"""Levels in sequence, the search against a server of known capacity, and the page."""

import asyncio
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.base.chart import Chart, Series, axis, draw, ticks
from cumulo.load.campaign import Campaign, LevelResult, Settings
from cumulo.load.client import Target
from cumulo.load.html_report import page
from cumulo.load.player import Level
from cumulo.load.prompts import constant
from cumulo.load.schedule import Arrivals, Workload
from cumulo.spec.slo import Slo
from tests.load.toy_server import Behaviour, ToyServer

pytestmark = pytest.mark.long


class Quiet:
    """A watcher that only remembers."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[LevelResult] = []

    def begin(self, label: str, number: int, levels: int | None) -> None:
        self.begun.append(label)

    def look(self, level: Level) -> None:
        pass

    def end(self, result: LevelResult) -> None:
        self.ended.append(result)


def settings(server: ToyServer, **changes: object) -> Settings:
    base = Settings(
        server.url,
        Target(""),
        [2],
        Workload(constant(30), constant(5)),
        conversations=6,
        warmup=2,
        settle_s=0.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def run(chosen: Settings) -> Campaign:
    campaign = Campaign(chosen, Quiet())
    asyncio.run(campaign.run())
    return campaign


def test_a_sweep_measures_every_level_with_fresh_prompts_and_leaves_the_warmup_out() -> None:
    with ToyServer() as server:
        campaign = run(settings(server, loads=[1, 3], slo=Slo(ttft_s=5.0)))
        prompts = [seen.body["messages"][0]["content"] for seen in server.measured]
    assert [result.label for result in campaign.results] == ["1 at once", "3 at once"]
    for result in campaign.results:
        assert len(result.records) == 8
        assert (result.summary.requests, result.summary.slo_met) == (6, 6)
        assert result.summary.mean_input_tokens == 30
        assert result.cpu_share > 0
    assert len(set(prompts)) == 16
    assert [result.most_running for result in campaign.results] == [1, 3]


def test_open_levels_have_the_same_requests_every_time() -> None:
    bodies = []
    for _ in range(2):
        with ToyServer() as server:
            run(settings(server, loads=[Arrivals(200.0)]))
            bodies.append(sorted(seen.body["messages"][0]["content"] for seen in server.seen))
    assert bodies[0] == bodies[1]


def test_an_interrupted_campaign_keeps_what_it_measured() -> None:
    async def interrupt(campaign: Campaign) -> None:
        task = asyncio.create_task(campaign.run())
        while sum(seen.ended_s > 0 for seen in server.measured) < 3:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with ToyServer(lambda number, body: Behaviour(first_s=30.0 if number > 4 else 0.01)) as server:
        campaign = Campaign(settings(server, loads=[1], conversations=50, warmup=0), Quiet())
        asyncio.run(interrupt(campaign))
    (result,) = campaign.results
    assert result.stopped
    assert result.summary.requests == result.summary.succeeded >= 3


class Tags(HTMLParser):
    """Every tag that opens, and whatever would reach out of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]


def test_the_page_needs_nothing_but_itself_and_its_plots_are_well_formed() -> None:
    hostile = "<script>alert(1)</script>"
    behave = lambda number, body: Behaviour("500") if number == 3 else Behaviour(gap_s=0.002)  # noqa: E731
    with ToyServer(behave) as server:
        campaign = run(settings(server, loads=[1, 3], slo=Slo(ttft_s=5.0, itl_s=1.0)))
    slo = campaign.settings.slo
    for results in (campaign.results, campaign.results[:1], []):
        text = page(hostile, {"Server": hostile}, results, slo, 3.0 if len(results) > 1 else None)
        tags = Tags()
        tags.feed(text)
        assert "script" not in tags.opened and "link" not in tags.opened
        assert tags.links == [] and "url(" not in text
        plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
        assert len(plots) == {2: 5 + 2 * 6, 1: 6, 0: 0}[len(results)]
        for plot in plots:
            ElementTree.fromstring(plot)
            assert "nan" not in plot
        assert "prefers-color-scheme:dark" in text
    assert "the toy is unwell" in page("t", {}, campaign.results, slo, None)


figures = st.just(0.0) | st.floats(1e-6, 1e9)


@given(
    st.lists(st.tuples(figures, figures), max_size=20),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["line", "dots", "both"]),
)
def test_every_point_is_drawn_inside_the_frame(
    points: list[tuple[float, float]], x_log: bool, y_log: bool, kind: str
) -> None:
    drawn = draw(Chart("t", "x", "y", [Series("s", points, kind)], x_log, y_log))  # type: ignore[arg-type]
    root = ElementTree.fromstring(drawn)
    for circle in root.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 560
        assert 0 <= float(circle.attrib["cy"]) <= 300


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.booleans())
def test_ticks_are_few_and_span_the_axis(values: list[float], log: bool) -> None:
    scale = axis(values, 0, 100, log, from_zero=False)
    marks = ticks(scale)
    assert 2 <= len(marks) <= 13
    assert marks[0] == pytest.approx(scale.low)
    if not log:
        assert marks[-1] == pytest.approx(scale.high)
        assert scale.low <= min(values) and max(values) <= scale.high
