"""The documentation's table is what the simulator says."""

from pathlib import Path

from cumulo.pipeline.decide.catalog import FAMILIES, build
from cumulo.pipeline.decide.check import peak_live_activations
from cumulo.pipeline.decide.costs import Costs
from cumulo.pipeline.simulate.timeline import simulate

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


def test_the_table_of_bubbles_is_measured() -> None:
    rows = {}
    for line in (
        PAGE.read_text("utf-8").split("## Which schedule to choose")[1].split("## Formulas")[0].splitlines()
    ):
        if line.startswith("| `"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name.strip("`")] = cells
    assert list(rows) == list(FAMILIES)
    for name, cells in rows.items():
        schedule = build(name, 8, 32)
        timeline = simulate(schedule, Costs.of_stage(schedule))
        messages = sum(span.action.kind.is_send for spans in timeline.spans for span in spans)
        peak = max(peak_live_activations(schedule)) * schedule.stages / schedule.chunks
        assert cells == [
            f"{max(timeline.bubble_s):g}",
            f"{timeline.bubble_ratio:.1%}",
            f"{max(timeline.inner_bubble_s):g}",
            f"{peak:g}",
            str(messages),
        ]


def test_every_schedule_has_its_picture() -> None:
    text = PAGE.read_text("utf-8")
    for name in FAMILIES:
        assert f"(images/schedule-{name}.svg)" in text
        assert (PAGE.parent / "images" / f"schedule-{name}.svg").is_file()
