"""docs/architecture.md names files that exist, and says where each decision is taken, once."""

import re

from tests.cli.conftest import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
_PATH = re.compile(r"`(cumulo(?:/[\w.]+)*/?)`")


def test_every_path_that_the_page_names_exists() -> None:
    paths = _PATH.findall(PAGE)
    assert len(paths) > 30
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_every_folder_of_the_package_is_a_room_of_the_page() -> None:
    rooms = PAGE.split("## The rooms")[1].split("\n## ")[0]
    folders = {path.parent.name for path in (ROOT / "cumulo").glob("*/__init__.py")}
    missing = {folder for folder in folders if f"| `{folder}` |" not in rooms}
    assert not missing


def test_each_decision_has_one_file() -> None:
    table = PAGE.split("## Where is it decided?")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    rows = [row for row in rows if "**" not in row[0]]  # headings inside the table
    assert len(rows) >= 30
    for question, place in rows:
        paths = _PATH.findall(place)
        assert len(paths) == 1, f"{question.strip()}: {place.strip()}"
        assert (ROOT / paths[0]).is_file(), paths[0]
