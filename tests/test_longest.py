"""The list that orders the suite names files that exist."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_file_that_runs_first_exists() -> None:
    names = (ROOT / "tests/longest.txt").read_text().split()
    assert len(set(names)) == len(names) > 10
    assert not [name for name in names if not (ROOT / name).is_file()]
