"""Shares of what a device can do: never more than all of it."""

import math

import pytest
import torch

from cumulo.spec.counting import flops_per_token
from cumulo.train.run import metrics
from cumulo.train.run.metrics import Ceiling, training_flops_per_token
from tests.train.layout_runs import DENSE


def test_a_ceiling_that_was_measured_too_low_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([10.0, 40.0, 20.0])
    for name in ("_measured", "_first_measured"):
        monkeypatch.setattr(metrics, name, lambda device, dtype: next(rates))
    ceiling = Ceiling(torch.device("cpu"), torch.float32, ranks=2)
    assert ceiling.share(5.0) == 0.25
    assert ceiling.share(60.0) == 0.75  # 10 was measured on a busy machine
    assert math.isnan(ceiling.share(90.0)) and ceiling.flops == 80.0
    assert math.isnan(ceiling.share(90.0))  # it is not measured for ever


def test_a_measured_ceiling_is_that_of_the_best_product() -> None:
    ceiling = Ceiling(torch.device("cpu"), torch.float32)
    assert ceiling.flops > 1e8 and ceiling.source == "a matrix product timed here"


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    whole, frozen = (training_flops_per_token(DENSE, 64, frozen) for frozen in (False, True))
    assert whole - frozen == flops_per_token(DENSE, 0)
    assert 2 / 3 <= frozen / whole < 1
