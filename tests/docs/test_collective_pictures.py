"""The pictures of algorithms are what the code draws now, and each has its section in the documentation."""

import runpy

from cumulo.collectives.decide.catalog import algorithms
from cumulo.collectives.decide.schedule import COLLECTIVES
from tests.cli.conftest import ROOT


def test_every_algorithm_has_its_current_picture() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "draw_collectives.py"))
    for name in made["PICTURES"]:
        assert (made["FOLDER"] / f"{name}.svg").read_text("utf-8") == made["drawn"](name)


def test_every_algorithm_has_a_section_with_its_command_and_picture() -> None:
    pictures = runpy.run_path(str(ROOT / "docs" / "draw_collectives.py"))["PICTURES"]
    page = (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    drawn = {(kind, algorithm): name for name, (kind, algorithm, _) in pictures.items()}
    for kind in COLLECTIVES:
        for algorithm in algorithms(kind):
            assert f"`cumulo collective show {kind} {algorithm} " in page
            assert f"(images/collectives/{drawn[kind, algorithm]}.svg)" in page
