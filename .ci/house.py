"""What no linter checks of the house: import circles, full folders, class names that mean two things, functions
whose name says nothing alone.

    python .ci/house.py circles folders names

`make lint` runs it. It needs nothing but Python.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_MODULES = 25
SAY_NOTHING = ("of", "at", "take")


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "cumulo").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a file, also inside `if TYPE_CHECKING` and `try`, but not inside functions: a late import is no circle."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ("body", "orelse", "finalbody", "handlers"):
                for child in getattr(node, inner, []):
                    yield from statements([child] if isinstance(child, ast.stmt) else child.body)


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    found = set()
    for node in statements(ast.parse(path.read_text("utf-8")).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # A name in a package may be one of its modules.
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found & set(known)


def circles() -> Iterator[str]:
    """Each strongly connected group of files, with one way round it."""
    known = modules()
    graph = {name: imports(path, known) - {name} for name, path in known.items()}
    reachable = {name: _reachable(name, graph) for name in graph}
    seen: set[str] = set()
    for name in sorted(graph):
        members = {other for other in reachable[name] if name in reachable[other]}
        if name in members and name not in seen:
            seen |= members
            way = " -> ".join(_way_round(name, {one: graph[one] & members for one in members}))
            yield f"import circle: {way}; move what both need into a third file, or give it as a parameter"


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        for name in graph[ahead.pop()] - found:
            found.add(name)
            ahead.append(name)
    return found


def _way_round(start: str, graph: dict[str, set[str]]) -> list[str]:
    """The shortest way from a file back to itself."""
    ways = [[start]]
    for way in ways:
        for name in sorted(graph[way[-1]]):
            if name == start:
                return [*way, start]
            if name not in way:
                ways.append([*way, name])
    return [start]


def folders() -> Iterator[str]:
    held = defaultdict(list)
    for path in modules().values():
        if path.name not in ("__init__.py", "__main__.py"):
            held[path.parent.relative_to(ROOT)].append(path.name)
    for folder, files in held.items():
        if len(files) > MOST_MODULES:
            yield f"{folder} has {len(files)} modules, {MOST_MODULES} at most: put those of one subject in a folder"


def names() -> Iterator[str]:
    homes = defaultdict(list)
    for path in modules().values():
        for node in statements(ast.parse(path.read_text("utf-8")).body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in SAY_NOTHING:
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield f"{place} defines {node.name}(): say of what, at what or what is taken"
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    for name, places in sorted(homes.items()):
        if len(places) > 1:
            yield f"class {name} is defined {len(places)} times: {', '.join(places)}; rename all but the most basic"


CHECKS = {"circles": circles, "folders": folders, "names": names}


def main(wanted: list[str]) -> int:
    found = [line for name in wanted or CHECKS for line in CHECKS[name]()]
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
