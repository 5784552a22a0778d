"""`cumulo bench quality` on a tiny model, and what it makes of its figures."""

from pathlib import Path

import pytest

from cumulo.bench.quantised import Figures, QualityConfig, chart, measure, parse_methods, rows
from cumulo.cli.view.quality import print_figures
from cumulo.errors import ConfigError
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
        measure(str(source), QualityConfig((), text=text, sequences=99, length=64), lambda *_: None)


def test_a_calibrated_method_that_is_worse_than_rounding_misses_its_bound(tmp_path: Path) -> None:
    import typer

    good = [figures("16-bit", 10.0), figures("rtn, 4 bits", 12.0), figures("gptq, 4 bits", 11.0)]
    bound = rows(good)[-1]
    assert (bound.value, bound.must, bound.ok) == (0.5, 1.0, True)
    plot = tmp_path / "quality.svg"
    print_figures(good, plot, tmp_path / "quality.json")
    assert plot.read_text().count("<circle") == 3 and "gptq, 4 bits" in plot.read_text()
    assert len(chart(good).series) == 3
    with pytest.raises(typer.Exit):
        print_figures([*good, figures("awq, 4 bits", 13.0)], None, None)


def test_unknown_methods_are_refused() -> None:
    assert parse_methods("rtn, gptq,rtn") == ("rtn", "gptq")
    with pytest.raises(ConfigError, match="--methods knows"):
        parse_methods("rtn,exl2")
