"""The pictures: well-formed, complete, and nothing drawn over anything else."""

import json
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.pipeline.decide.actions import PipelineSchedule
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.costs import Costs, Link
from cumulo.pipeline.draw import columns_to_read, text_rows, to_perfetto, to_svg
from cumulo.pipeline.simulate.timeline import simulate
from tests import thorough
from tests.pipeline.strategies import schedules

SVG = "{http://www.w3.org/2000/svg}"


@settings(max_examples=thorough.examples(8))
@given(schedule=schedules(4, 10))
def test_the_svg_has_one_box_for_every_action_and_none_covers_another(schedule: PipelineSchedule) -> None:
    timeline = simulate(schedule)
    root = ElementTree.fromstring(to_svg(timeline, "a < b & c", width=900))
    boxes = []
    for group in root.iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        assert box is not None
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + width <= 900.1
        boxes.append((x, y, x + width, y + height))
    assert len(boxes) == sum(len(order) for order in schedule.orders)
    slack = 0.11  # coordinates are rounded to tenths of a pixel
    for index, (left, top, right, bottom) in enumerate(boxes):
        for other_left, other_top, other_right, other_bottom in boxes[:index]:
            apart = (
                left >= other_right - slack
                or other_left >= right - slack
                or top >= other_bottom
                or other_top >= bottom
            )
            assert apart


def test_the_svg_shows_micro_batches_and_a_legend() -> None:
    root = ElementTree.fromstring(to_svg(simulate(build("zb-v", 2, 4)), "zb-v"))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert all(str(batch) in texts for batch in range(4))
    assert {"zb-v", "stage 0", "stage 1", "forward", "weight gradient, other chunk"} <= set(texts)


def test_the_trace_has_every_action_with_its_time_in_microseconds() -> None:
    timeline = simulate(build("dualpipe", 4, 8), Costs(link=Link(latency_s=0.5)))
    events = json.loads(to_perfetto(timeline))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(len(spans) for spans in timeline.spans)
    last = max(event["ts"] + event["dur"] for event in slices)
    assert last == timeline.makespan_s * 1e6
    tracks = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in slices} <= tracks
    assert all(event["tid"] % 2 == 0 for event in slices if event["cat"] in ("forward", "backward"))


@settings(max_examples=thorough.examples(20))
@given(schedule=schedules(4, 12), columns=st.integers(1, 300))
def test_every_line_of_text_fills_the_columns(schedule: PipelineSchedule, columns: int) -> None:
    rows = text_rows(simulate(schedule), columns)
    assert len(rows) == schedule.stages
    assert all(sum(len(cell.text) for cell in row) == columns for row in rows)


def test_wide_enough_text_shows_every_action() -> None:
    timeline = simulate(build("1f1b", 2, 3))
    rows = text_rows(timeline, columns_to_read(timeline))
    assert ["".join(cell.text for cell in row) for row in rows] == [
        "F0F1    B0··F2B1··  B2··",
        "  F0B0··F1B1··F2B2··    ",
    ]
