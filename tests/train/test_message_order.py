"""When gradients and weights travel is a choice that changes no bit of a run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.train.decide.bucket_order import BucketTiming, send_order, timings
from cumulo.train.decide.config import OptimizerConfig, TrainConfig
from cumulo.train.run.verify import Outcome
from tests import thorough
from tests.train.layout_runs import SPECS, train_config, train_parallel

PLAIN = OptimizerConfig(learning_rate=1e-2, clip_norm=0)


def _run(layout: Layout, **changes: Any) -> list[Outcome]:
    config = replace(train_config(layout, 8), dtype="float32", gradient_bucket_mib=0.002, **changes)
    return train_parallel(SPECS["dense"], config)


def _same(first: list[Outcome], second: list[Outcome]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.losses == other.losses
        assert one.weights.keys() == other.weights.keys()
        for name, (_, weight) in one.weights.items():
            assert torch.equal(weight, other.weights[name][1]), name


def test_gradients_by_priority_train_the_same_weights_bit_by_bit() -> None:
    layout = Layout(dp=4 if thorough.chosen else 2)
    _same(_run(layout, optimizer=PLAIN), _run(layout, optimizer=PLAIN, gradient_order="priority"))


def test_prefetching_weights_or_not_trains_the_same_weights_bit_by_bit() -> None:
    _same(*(_run(Layout(dp=2, zero=3), fsdp_prefetch=way) for way in ("pre", "post")))


def test_priority_refuses_what_needs_all_gradients_first() -> None:
    for changes in ({"layout": Layout(dp=2, zero=1)}, {"layout": Layout(dp=2)}):
        with pytest.raises(ConfigError, match="gradient_order: priority"):
            TrainConfig(gradient_order="priority", **changes)


def test_with_a_slow_network_what_forward_needs_first_leaves_as_soon_as_it_is_there() -> None:
    slow = timings([1, 1, 1, 1], needed=[3, 2, 1, 0], backward_s=4.0, bytes_per_s=0.4)
    assert send_order(slow) == (0, 2, 3, 1)  # by the time the first has left, the third is there
    fast = timings([1, 1, 1, 1], needed=[3, 2, 1, 0], backward_s=4.0, bytes_per_s=100.0)
    assert send_order(fast) == (0, 1, 2, 3)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.integers(0, 5)), max_size=8))
def test_every_bucket_leaves_once(rows: list[tuple[float, float, int]]) -> None:
    assert sorted(send_order([BucketTiming(*row) for row in rows])) == list(range(len(rows)))
