"""The page that leads newcomers through the engine: its twelve files exist, and are short enough to be read."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/start/understand-the-code.md").read_text("utf-8")
FILES = re.findall(r"^\d+\. `(cumulo/[a-z_/]+\.py)`", PAGE, flags=re.MULTILINE)
MOST_LINES = 4000
SCREEN = 45


def test_twelve_files_that_exist_have_at_most_4000_lines() -> None:
    assert len(FILES) == len(set(FILES)) == 12
    lines = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in FILES}
    assert sum(lines.values()) <= MOST_LINES, lines


def test_planning_a_step_fits_on_a_screen() -> None:
    tree = ast.parse((ROOT / "cumulo/engine/decide/core/scheduler.py").read_text("utf-8"))
    (plan,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "plan"]
    assert plan.end_lineno is not None and plan.end_lineno - plan.lineno < SCREEN
