"""The mesh in words: every rank where the layout puts it, every parameter moved by somebody."""

import re

import pytest

from cumulo.layout.layout import Layout
from cumulo.spec.counting import parameter_count
from cumulo.train.decide.config import TrainConfig, config_from, known_spec
from cumulo.train.decide.layout_report import explain_layout


def config_of(layout: dict[str, object]) -> TrainConfig:
    return config_from(
        {
            "model": {"hidden": 64, "heads": 4, "layers": 4},
            "batch_sequences": 16,
            "micro_batch": 2,
            "layout": layout,
        }
    )


@pytest.mark.parametrize(
    "layout",
    [{}, {"dp": 2, "zero": 1}, {"dp": 2, "tp": 2, "pp": 2, "zero": 3}, {"pp": 2, "schedule": "dualpipe"}],
)
def test_every_rank_has_a_line_with_its_place_and_its_part(layout: dict[str, object]) -> None:
    config = config_of(layout)
    spec = known_spec(config)
    assert spec is not None
    text = explain_layout(config, spec)
    lines = [line for line in text.splitlines() if re.match(r"\s+\d+ ", line)]
    assert len(lines) == config.layout.world
    moved = 0
    for rank, line in enumerate(lines):
        at = config.layout.place(rank)
        numbers = [int(number) for number in line.split()[:5]]
        assert numbers == [rank, at.pp, at.dp, at.cp, at.tp]
        moved += int(line.split()[-1].replace(",", ""))
    # Each weight is moved by one rank, or by every one that has a copy of it.
    assert moved >= parameter_count(spec)
    if config.layout == Layout(dp=2, zero=1):
        assert moved == parameter_count(spec)
    assert f"in {16 // config.layout.dp // 2} micro-batch" in text


def test_large_layouts_are_cut_short_and_a_model_that_is_not_known_is_left_out() -> None:
    config = config_from({"batch_sequences": 64, "micro_batch": 1, "layout": {"dp": 64}})
    text = explain_layout(config, None)
    assert "... and 32 more" in text
    assert "parameters" not in text
    assert "have different samples: (0 1 2" in text
