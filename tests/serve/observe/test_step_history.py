"""The hour of history: what each slice of time contains, and that it stays small."""

from cumulo.serve.engine_link.messages import Stats, StepRecord
from cumulo.serve.observe.step_history import StepHistory


def stats(records: list[StepRecord], running: int = 1, waiting: int = 0) -> Stats:
    return Stats(1, 1, running, waiting, 5, 100, 0, 0, records=records)


def test_tokens_fall_into_the_second_in_which_their_step_finished() -> None:
    history = StepHistory()
    history.note(stats([StepRecord(1, 99.0, 99.5, 30, 2, 2), StepRecord(2, 99.5, 99.9, 0, 3, 3)]), 99.95)
    history.note(stats([StepRecord(3, 100.0, 100.25, 7, 0, 0)], running=4, waiting=2), 100.3)
    before, last = history.last(101.0, 2)
    assert (before.prefill_tokens, before.decode_tokens, before.steps) == (30, 5, 2)
    assert (last.prefill_tokens, last.running, last.waiting, last.blocks_used) == (7, 4, 2, 5)
    assert last.busy_s == 0.25


def test_an_hour_is_kept_in_slices_that_can_be_merged() -> None:
    history = StepHistory()
    for second in range(2 * 3600):
        history.note(stats([StepRecord(second, second, second + 0.5, 0, 1, 1)]), second + 0.5)
    hour = history.last(7200.0, 120, width_s=30)
    assert len(hour) == 120 and {part.decode_tokens for part in hour} == {30}
    assert sum(part.decode_tokens for part in history.last(7200.0, 60)) == 60
    assert len(history._seconds) <= 3660


def test_a_time_without_steps_is_empty() -> None:
    assert [part.steps for part in StepHistory().last(50.0, 3)] == [0, 0, 0]
