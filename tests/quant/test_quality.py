"""`cumulo bench quality` on a tiny model, and what it makes of its figures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cumulo.bench.quantised import Figures, QualityConfig, chart, growth_rows, measure
from cumulo.cli.bench.verbs import print_figures
from cumulo.errors import ConfigError, CumuloError
from tests.quant.folders import TEXT, tiny_folder


def figures(name: str, perplexity: float) -> Figures:
    return Figures(name, 1 << 20, perplexity, 0.1, 0.9, 10.0, 1.5)


def test_a_method_and_a_folder_are_measured_against_the_model(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    config = QualityConfig(("rtn",), (source,), text=text, sequences=2, length=32, rounds=1, threads=1)
    plain, quantised, same = measure(str(source), config, lambda stage, done, total: None)
    assert (plain.kl, plain.agreement) == (0.0, 1.0) and plain.perplexity > 1
    assert same.kl == pytest.approx(0, abs=1e-6) and same.perplexity == pytest.approx(
        plain.perplexity, rel=1e-4
    )
    assert quantised.kl > 1e-4 and quantised.weight_bytes < plain.weight_bytes
    assert quantised.name.startswith("rtn, 4 bits")
    with pytest.raises(ConfigError, match="the text has"):
        measure(str(source), QualityConfig(("rtn",), text=text, sequences=99, length=64), lambda *_: None)


def test_a_calibrated_method_that_is_worse_than_rounding_misses_its_bound(tmp_path: Path) -> None:
    import typer

    good = [figures("16-bit", 10.0), figures("rtn, 4 bits", 12.0), figures("gptq, 4 bits", 11.0)]
    bound = growth_rows(good)[-1]
    assert (bound.value, bound.must, bound.ok) == (0.5, 1.0, True)
    plot = tmp_path / "quality.svg"
    print_figures(good, plot, tmp_path / "quality.json")
    assert plot.read_text().count("<circle") == 3 and "gptq, 4 bits" in plot.read_text()
    assert len(chart(good).series) == 3
    with pytest.raises(typer.Exit):
        print_figures([*good, figures("awq, 4 bits", 13.0)], None, None)


def test_one_short_sequence_is_enough(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "tiny")
    config = QualityConfig((), (source,), sequences=1, length=16, rounds=1, threads=1)
    plain, same = measure(str(source), config, lambda *_: None)
    assert same.kl == pytest.approx(0, abs=1e-6) and plain.perplexity > 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": ()}, "name a method or a folder to compare"),
        ({"length": 100_000}, "--length 100,000 is more than the model's context of 512 tokens"),
        ({"group": 48}, "--group 48 does not divide"),
        ({"folders": (Path("nowhere"),)}, "there is no model at 'nowhere'"),
        ({"text": Path("nowhere.txt")}, "--text nowhere.txt cannot be read: No such file"),
    ],
)
def test_what_would_fail_later_is_refused_before_anything_is_read(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = tiny_folder(tmp_path / "tiny")
    told: list[str] = []
    with pytest.raises(CumuloError, match=said):
        measure(
            str(source), replace(QualityConfig(("rtn",)), **changes), lambda stage, *_: told.append(stage)
        )
    assert told == []
