"""When weights travel is a choice that changes no bit of a run."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cumulo.layout.layout import Layout
from cumulo.train.run.verify import Outcome
from tests.train.layout_runs import SPECS, train_config, train_parallel

pytestmark = pytest.mark.long


def _run(layout: Layout, **changes: Any) -> list[Outcome]:
    config = replace(train_config(layout, 8), dtype="float32", gradient_bucket_mib=0.002, **changes)
    return train_parallel(SPECS["dense"], config)


def _same(first: list[Outcome], second: list[Outcome]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.losses == other.losses
        assert one.weights.keys() == other.weights.keys()
        for name, (_, weight) in one.weights.items():
            assert torch.equal(weight, other.weights[name][1]), name


def test_prefetching_weights_or_not_trains_the_same_weights_bit_by_bit() -> None:
    _same(*(_run(Layout(dp=2, zero=3), fsdp_prefetch=way) for way in ("pre", "post")))
