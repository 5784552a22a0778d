"""`cumulo bench ddp`: both sides train the same model, and every figure is there."""

import pytest

from cumulo.bench import ddp as bench_ddp


@pytest.mark.thorough
def test_both_sides_train_the_same_model() -> None:
    told: list[str] = []
    ratio, ours, theirs, difference = bench_ddp.measure(2, rounds=1, steps=1, tell=told.append)
    assert ratio.must == 0.9
    assert isinstance(ratio.value, float) and ratio.value > 0
    assert isinstance(ours.value, float) and isinstance(theirs.value, float)
    assert ours.value / theirs.value == pytest.approx(ratio.value)
    assert difference.ok, difference
    assert told
