"""Every worked example of the planner's pages is run, and says what the page says."""

import doctest
from pathlib import Path

import pytest

from cumulo.spec.catalog import Catalog

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["planning.md", "plan-memory.md"])
def test_the_worked_examples_of_the_page_hold(page: str) -> None:
    result = doctest.testfile(str(DOCS / page), module_relative=False, encoding="utf-8")
    assert result.attempted > 5
    assert result.failed == 0


def test_the_catalogue_of_the_page_can_be_read(tmp_path: Path) -> None:
    text = (DOCS / "planning.md").read_text("utf-8").split("```yaml\n")[1].split("```")[0]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert Catalog.load(path).cluster(16, node="box", fabric="office").nodes == 4
