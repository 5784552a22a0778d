"""The pictures and pages of algorithms are what the code draws and counts now."""

import runpy

from cumulo.collectives.decide.catalog import algorithms
from cumulo.collectives.decide.schedule import COLLECTIVES
from tests.cli.conftest import ROOT


def test_every_algorithm_has_its_current_picture() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "draw_collectives.py"))
    for name in made["PICTURES"]:
        assert (made["FOLDER"] / f"{name}.svg").read_text("utf-8") == made["drawn"](name)


def test_every_algorithm_has_a_page_with_its_picture_steps_and_cost() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "write_algorithms.py"))
    pairs = {(kind, name) for kind in COLLECTIVES for name in algorithms(kind)}
    assert set(made["WORDS"]) == pairs
    index, menu = ((ROOT / page).read_text("utf-8") for page in ("docs/collectives.md", "mkdocs.yml"))
    for pair in pairs:
        path = f"algorithms/{made['slug'](*pair)}.md"
        text = (ROOT / "docs" / path).read_text("utf-8")
        output = text.partition("```text\n")[2].partition("```")[0]
        assert "right on every rank   yes" in output and "step   1" in output
        assert text == made["page"](*pair, output), "run python docs/write_algorithms.py"
        assert f"({path})" in index and path in menu
