"""The checker finds what is wrong with a schedule, whatever it is, and names the stage and the action."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, Sends
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.check import check
from cumulo.pipeline.decide.communication import with_communication
from cumulo.pipeline.decide.orders import ScheduleError
from tests import thorough
from tests.pipeline.strategies import schedules

Order = list[Action]


def changed(schedule: PipelineSchedule, stage: int, change: Callable[[Order], None]) -> PipelineSchedule:
    orders = [list(order) for order in schedule.orders]
    change(orders[stage])
    return replace(schedule, orders=tuple(tuple(order) for order in orders))


def refusal(schedule: PipelineSchedule, sends: Sends = Sends.BUFFERED) -> str:
    with pytest.raises(ScheduleError) as refused:
        check(schedule, sends)
    return str(refused.value)


@settings(max_examples=thorough.examples(25))
@given(schedule=schedules(4, 10), data=st.data())
def test_a_schedule_that_lacks_any_one_action_is_refused_by_its_name(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, schedule.stages - 1))
    position = data.draw(st.integers(0, len(schedule.orders[stage]) - 1))
    gone = schedule.orders[stage][position]
    words = refusal(changed(schedule, stage, lambda order: order.pop(position)))
    assert f"stage {stage}" in words
    assert f"(micro-batch {gone.micro_batch}, chunk {gone.chunk}" in words or "overlaps" in words


@settings(max_examples=thorough.examples(25))
@given(schedule=schedules(4, 10), data=st.data())
def test_a_schedule_that_repeats_any_one_action_is_refused_by_its_name(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, schedule.stages - 1))
    again = replace(data.draw(st.sampled_from(schedule.orders[stage])), overlaps_next=False)
    words = refusal(changed(schedule, stage, lambda order: order.append(again)))
    assert f"stage {stage} runs {again}" in words
    assert "already done" in words


@settings(max_examples=thorough.examples(25))
@given(schedule=schedules(4, 10), data=st.data())
def test_a_backward_before_its_forward_is_refused_by_name(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, schedule.stages - 1))
    order = schedule.orders[stage]
    backward = data.draw(st.sampled_from([action for action in order if action.kind.gives_input_gradient]))
    alone = replace(backward, overlaps_next=False)

    def move(actions: Order) -> None:
        actions[:] = [replace(action, overlaps_next=False) for action in actions if action != backward]
        actions.insert(0, alone)

    words = refusal(changed(schedule, stage, move))
    assert f"stage {stage} runs {alone} before " in words


def test_a_weight_gradient_before_its_input_gradient_is_refused() -> None:
    def swap(order: Order) -> None:
        at = next(
            position
            for position, (first, second) in enumerate(pairwise(order))
            if (first.kind, second.kind) == (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        order[at], order[at + 1] = order[at + 1], order[at]

    words = refusal(changed(build("zb-h1", 4, 8), 0, swap))
    assert words.startswith("zb-h1: stage 0 runs W(micro-batch 0, chunk 0) before I(micro-batch 0, chunk 0)")


def test_stages_that_wait_for_one_another_are_a_deadlock_with_all_of_them_named() -> None:
    """Stage 0 wants the gradient of 0 before it sends 1, stage 1 wants 1 before it gives the gradient of 0."""

    def reorder(*letters: tuple[Kind, int]) -> Callable[[Order], None]:
        def change(order: Order) -> None:
            chunk = order[0].chunk
            order[:] = [Action(kind, batch, chunk) for kind, batch in letters]

        return change

    forward, backward = Kind.FORWARD, Kind.BACKWARD
    schedule = changed(
        build("1f1b", 2, 2), 0, reorder((forward, 0), (backward, 0), (forward, 1), (backward, 1))
    )
    schedule = changed(schedule, 1, reorder((forward, 0), (forward, 1), (backward, 0), (backward, 1)))
    words = refusal(schedule)
    assert "deadlock" in words
    assert "stage 0 stands at receive gradient(micro-batch 0, chunk 0) from stage 1" in words
    assert "stage 1 stands at receive activation(micro-batch 1, chunk 1) from stage 0" in words


def test_what_overlaps_cannot_need_each_other() -> None:
    """On the last stage of 1F1B a forward is followed by its own backward."""

    def overlap(order: Order) -> None:
        order[0] = replace(order[0], overlaps_next=True)

    words = refusal(changed(build("1f1b", 2, 2), 1, overlap))
    assert "stage 1 runs B(micro-batch 0, chunk 1)" in words
    assert "F(micro-batch 0, chunk 1), which it needs" in words


def test_an_action_on_the_wrong_stage_is_refused() -> None:
    stranger = Action(Kind.FORWARD, 0, 2)
    words = refusal(changed(build("1f1b", 4, 8), 1, lambda order: order.append(stranger)))
    assert "stage 1 runs F(micro-batch 0, chunk 2), but that chunk is on stage 2" in words


def test_a_micro_batch_or_chunk_that_does_not_exist_is_refused() -> None:
    schedule = build("dualpipe", 4, 8)
    late = Action(Kind.FORWARD, 7, 0)  # the second half goes the other way
    assert "no such micro-batch" in refusal(changed(schedule, 0, lambda order: order.append(late)))
    beyond = Action(Kind.FORWARD, 0, 4)
    assert "no such chunk" in refusal(changed(schedule, 0, lambda order: order.append(beyond)))


def test_sends_that_wait_deadlock_where_receives_stand_as_late_as_possible() -> None:
    """1F1B's neighbours send to each other at the same time: fine with isend, a deadlock with a blocking send."""
    late = with_communication(build("1f1b", 2, 4), Sends.BUFFERED)
    check(late, Sends.BUFFERED)
    words = refusal(late, Sends.RENDEZVOUS)
    assert "deadlock with rendezvous sends" in words
    assert "stage 0 stands at send activation" in words
    assert "stage 1 stands at send gradient" in words


def test_a_send_or_receive_that_is_missing_is_refused() -> None:
    schedule = with_communication(build("1f1b", 2, 2))
    without_send = changed(
        schedule, 0, lambda order: order.remove(Action(Kind.SEND_ACTIVATION, 1, 0, peer=1))
    )
    assert "needs send activation(micro-batch 1, chunk 0) to stage 1, and stage 0's order never" in refusal(
        without_send
    )
    without_receive = changed(
        schedule, 1, lambda order: order.remove(Action(Kind.RECEIVE_ACTIVATION, 1, 1, peer=0))
    )
    assert "stage 1 stands at F(micro-batch 1, chunk 1), which needs receive activation" in refusal(
        without_receive
    )


def test_messages_received_in_another_order_than_sent_are_refused() -> None:
    schedule = with_communication(build("gpipe", 2, 2))

    def swap(order: Order) -> None:
        receives = [position for position, action in enumerate(order) if action.kind.is_receive]
        first, second = receives[:2]
        order[first], order[second] = order[second], order[first]

    assert "in the order in which they are sent" in refusal(changed(schedule, 1, swap))


@settings(max_examples=thorough.examples(15))
@given(schedule=schedules(6, 16), sends=st.sampled_from(tuple(Sends)))
def test_communication_changes_no_compute_and_pairs_every_send_with_one_receive(
    schedule: PipelineSchedule, sends: Sends
) -> None:
    full = with_communication(schedule, sends)
    links: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for stage in range(schedule.stages):
        assert full.compute_order(stage) == schedule.orders[stage]
        for action in full.orders[stage]:
            if action.kind.is_send:
                links.setdefault((stage, action.peer or 0), ([], []))[0].append(action.micro_batch)
            elif action.kind.is_receive:
                links.setdefault((action.peer or 0, stage), ([], []))[1].append(action.micro_batch)
    assert all(sent == received for sent, received in links.values())
    crossings = sum(
        schedule.stage_of(chunk, direction) != schedule.stage_of(chunk + 1, direction)
        for direction in range(schedule.directions)
        for chunk in range(schedule.chunks - 1)
    )
    per_direction = schedule.micro_batches // schedule.directions
    assert sum(len(sent) for sent, _ in links.values()) == 2 * crossings * per_direction
