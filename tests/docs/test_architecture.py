"""docs/architecture.md names files that are there, and every room."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text("utf-8")
ROOMS = PAGE.partition("## The rooms")[2].partition("\n## ")[0]


def test_every_file_and_folder_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(cumulo/[\w/.]+)`", PAGE)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_table_of_rooms_has_every_room() -> None:
    rooms = {path.name for path in (ROOT / "cumulo").iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^\| `(\w+)` \|", ROOMS, re.M)) == rooms
