"""Shapes that steps are rounded up to: large enough for the step, never larger than the buffers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.engine.play.cuda.step_words import DRAW_WORDS, StepShape, shape_of


@given(data=st.data(), most_tokens=st.integers(1, 10_000), most_rows=st.integers(1, 600), cuts=st.booleans())
def test_a_shape_holds_the_step_and_fits_into_the_buffers(
    data: st.DataObject, most_tokens: int, most_rows: int, cuts: bool
) -> None:
    most = StepShape(most_tokens, most_rows, most_rows)
    rows = data.draw(st.integers(1, min(most_rows, most_tokens)))
    tokens = data.draw(st.one_of(st.just(rows), st.integers(rows, most_tokens)))
    draws = data.draw(st.integers(0, most_rows))
    shape = shape_of(tokens, rows, draws, most, cuts)
    assert tokens <= shape.tokens <= most_tokens
    assert rows <= shape.rows <= most_rows
    assert draws <= shape.draws <= most_rows
    assert shape.decodes_only == (tokens == rows)
    assert not shape.decodes_only or shape.tokens == shape.rows


@pytest.mark.parametrize("step", [(41, 5, 5), (40, 9, 5), (40, 5, 9)])
def test_a_step_larger_than_the_buffers_is_refused(step: tuple[int, int, int]) -> None:
    with pytest.raises(RuntimeError, match="does not fit into buffers for 40, 8 and 8"):
        shape_of(*step, StepShape(40, 8, 8))


def test_the_words_of_a_draw_stand_where_the_sampling_kernel_reads_them() -> None:
    sample = pytest.importorskip("cumulo.kernels.cuda.sampling.sample")
    assert [getattr(sample, word.upper()) for word in DRAW_WORDS] == list(range(sample.COLUMNS))
