"""Benchmarks take names of each other that exist: most of them need a GPU, and are not run by tests."""

import ast
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def defined(tree: ast.Module) -> set[str]:
    """Every name that the module's top level binds."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        else:
            found |= {
                one.id
                for one in ast.walk(node)
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            }
    return found


def test_what_a_benchmark_takes_from_another_is_there() -> None:
    trees = {path.stem: ast.parse(path.read_text("utf-8")) for path in BENCHMARKS.glob("*.py")}
    taken = [
        (name, node.module.removeprefix("benchmarks."), one.name)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks.")
        for one in node.names
        if node.module
    ]
    assert taken
    missing = [use for use in taken if use[2] not in defined(trees[use[1]])]
    assert not missing
