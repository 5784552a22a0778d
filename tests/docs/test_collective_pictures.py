"""The pictures of docs/collectives.md are what the drawing code draws now."""

import runpy

from tests.cli.conftest import ROOT


def test_every_algorithm_has_its_current_picture() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "draw_collectives.py"))
    page = (ROOT / "docs" / "collectives.md").read_text("utf-8")
    for name in made["PICTURES"]:
        assert f"images/collectives/{name}.svg" in page
        assert (made["FOLDER"] / f"{name}.svg").read_text("utf-8") == made["drawn"](name)
