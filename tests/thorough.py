"""Whether `--thorough` was given, set by conftest.py; and what tests say to take less without it."""

from typing import Any

import pytest

chosen = False


def examples(count: int) -> int:
    """How many examples of a property are drawn: all with `--thorough`, else a quarter, but at least three."""
    return count if chosen else min(count, max(3, count // 4))


def rare(*cases: Any) -> list[Any]:
    """For `parametrize`: cases that are like the others in the list; they run with `--thorough` only."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)
        for case in cases
    ]
