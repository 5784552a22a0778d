"""The simulator's times: against a longest path computed from the definition, and links by hand."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import InvalidRequest
from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, Sends, blocks
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.costs import ChunkCost, Costs, Link
from cumulo.pipeline.simulate.timeline import simulate
from tests import thorough
from tests.pipeline.strategies import schedules


def longest_paths(schedule: PipelineSchedule, costs: Costs) -> dict[tuple[str, int, int], float]:
    """When every compute action ends, by recursion over the definition: after the block before it on its stage and
    after what it needs, plus the latency where that comes from another stage."""
    orders = [list(blocks(order)) for order in schedule.orders]
    where = {
        (half, action.micro_batch, action.chunk): (stage, position)
        for stage, stage_blocks in enumerate(orders)
        for position, block in enumerate(stage_blocks)
        for action in block
        for half in ("IW" if action.kind is Kind.BACKWARD else action.kind.value)
    }

    def needed(action: Action) -> list[tuple[str, int, int]]:
        batch, chunk = action.micro_batch, action.chunk
        if action.kind is Kind.FORWARD:
            return [("F", batch, chunk - 1)]
        if action.kind is Kind.BACKWARD_WEIGHT:
            return [("I", batch, chunk)]
        return [("F", batch, chunk), ("I", batch, chunk + 1)]

    @cache
    def end_s(stage: int, position: int) -> float:
        start_s = end_s(stage, position - 1) if position else 0.0
        for action in orders[stage][position]:
            for need in needed(action):
                if need in where:
                    other, at = where[need]
                    start_s = max(start_s, end_s(other, at) + costs.link.latency_s * (other != stage))
        return start_s + costs.block_s(orders[stage][position])

    ends: dict[tuple[str, int, int], float] = {}
    for position in range(max(len(order) for order in orders)):  # in rising order: shallow recursion
        for stage, order in enumerate(orders):
            if position < len(order):
                for action in order[position]:
                    ends[action.kind.value, action.micro_batch, action.chunk] = end_s(stage, position)
    return ends


@settings(max_examples=thorough.examples(30))
@given(schedule=schedules(6, 16), data=st.data())
def test_every_action_ends_when_the_longest_path_to_it_does(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    seconds = st.integers(0, 7).map(float)
    each = st.builds(ChunkCost, seconds, seconds, seconds)
    costs = Costs(
        tuple(data.draw(st.lists(each, min_size=schedule.chunks, max_size=schedule.chunks))),
        overlap_saving=data.draw(st.sampled_from((0.0, 0.25))),
        link=Link(latency_s=data.draw(seconds)),
    )
    timeline = simulate(schedule, costs)
    ends = {
        (span.action.kind.value, span.action.micro_batch, span.action.chunk): span.end_s
        for spans in timeline.compute_spans
        for span in spans
    }
    assert ends == longest_paths(schedule, costs)


def test_a_message_takes_latency_and_bytes_over_bandwidth_and_waits_for_the_one_before() -> None:
    # Two forwards of 1 s; each message occupies the link for 4 s and then needs 0.5 s more to arrive.
    costs = Costs((ChunkCost(1, 1, 1),), link=Link(latency_s=0.5, bytes_per_s=25), message_bytes=100)
    last = simulate(build("gpipe", 2, 2), costs).compute_spans[1]
    assert [(str(span.action.kind), span.start_s) for span in last[:2]] == [("F", 5.5), ("F", 9.5)]


def test_a_rendezvous_holds_the_sender_until_the_receiver_comes() -> None:
    costs = Costs((ChunkCost(1, 1, 1), ChunkCost(5, 5, 5)))
    sends = [
        span
        for span in simulate(build("gpipe", 2, 2), costs, Sends.RENDEZVOUS).spans[0]
        if span.action.kind.is_send
    ]
    # The second message is ready at 2 s, when the slow stage has 4 s left of the first forward.
    assert [(span.start_s, span.end_s) for span in sends] == [(1.0, 1.0), (2.0, 6.0)]
    buffered = simulate(build("gpipe", 2, 2), costs).spans[0]
    assert [span.end_s for span in buffered if span.action.kind.is_send] == [1.0, 2.0]


def test_a_slow_stage_sets_the_pace() -> None:
    costs = Costs(tuple(ChunkCost(each, each, each) for each in (1, 1, 3, 1)))
    timeline = simulate(build("1f1b", 4, 32), costs)
    ratios = [idle_s / timeline.makespan_s for idle_s in timeline.bubble_s]
    assert min(ratios) == ratios[2] < 0.1
    assert all(ratio > 0.6 for stage, ratio in enumerate(ratios) if stage != 2)


def test_busy_and_idle_time_add_up_to_the_step() -> None:
    timeline = simulate(build("dualpipe", 4, 8), Costs(overlap_saving=0.25))
    assert [busy + idle for busy, idle in zip(timeline.busy_s, timeline.bubble_s, strict=True)] == [
        timeline.makespan_s
    ] * 4


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ChunkCost(forward_s=-1), "forward_s"),
        (lambda: ChunkCost(backward_weight_s=float("nan")), "backward_weight_s"),
        (lambda: Link(latency_s=float("inf")), "latency"),
        (lambda: Link(bytes_per_s=0), "bandwidth"),
        (lambda: Costs(overlap_saving=1), "overlap"),
        (lambda: Costs(message_bytes=-1), "bytes"),
        (lambda: simulate(build("1f1b", 4, 8), Costs((ChunkCost(),) * 3)), "3 chunk costs"),
    ],
)
def test_impossible_costs_are_refused(make: object, word: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidRequest, match=word):
        make()
