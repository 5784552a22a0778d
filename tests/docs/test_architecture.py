"""docs/architecture.md names files that are there, and each decision once."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text("utf-8")
ROOMS, DECISIONS = (
    PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    for heading in ("The rooms", "Where is it decided?")
)


def test_every_file_and_folder_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(cumulo/[\w/.]+)`", PAGE)
    assert len(named) > 100
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_each_decision_has_one_file_and_each_file_is_named_for_one_decision() -> None:
    rows = re.findall(r"^\| ([^|*]+) \| `(cumulo/[\w/.]+\.py)` \|$", DECISIONS, re.M)
    assert len(rows) > 100
    for column in zip(*rows, strict=True):
        assert [name for name, count in Counter(column).items() if count > 1] == []


def test_the_table_of_rooms_has_every_room() -> None:
    rooms = {path.name for path in (ROOT / "cumulo").iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^\| `(\w+)` \|", ROOMS, re.M)) == rooms
