"""What no linter checks of the house: import circles, full folders, class names that mean two things, functions
whose name says nothing alone, line budgets, texts that are no sentences, and formulas that are written again.

    python .ci/house.py circles folders names budgets words formulas

`make lint` runs it. It needs nothing but Python.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_MODULES = 25
SAY_NOTHING = ("of", "at", "take")
METRICS = ("Counter", "Gauge", "Histogram", "Info")
FRAGMENT = re.compile(r"(Of|So|Such|Those|As|Its|Whose|And|Both|Nor|That)\b(?![^.:;]*, )")

# The most that each room, the package, benchmarks and docs may have. Raising one needs a reason in the commit.
LINES_PER_ROOM = {
    "base": 1_760,
    "bench": 3_161,
    "checkpoint": 1_450,
    "cli": 8_830,  # with answers in five lines first, and the four verbs of the compiler
    "cluster": 10_690,  # with Slurm's own scheduling, to rehearse it, and its jobs whose script was killed
    "collectives": 4_200,
    "compile": 7_700,  # stages of kernels, a back end of Triton, torch.compile, ONNX; 5,000 is what it should have
    "console": 5_000,
    "diagnose": 1_900,
    "engine": 15_930,
    "errors.py and the like": 100,
    "fleet": 2_750,
    "gateway": 1_700,
    "kernels": 9_400,
    "layout": 1_250,
    "load": 2_500,
    "models": 8_750,
    "pipeline": 2_150,
    "plan": 10_080,  # with ranges of failures, and what is extrapolated
    "quant": 1_200,
    "ranks": 2_450,
    "serve": 16_100,
    "spec": 2_350,
    "train": 7_950,
}
MOST_LINES, MOST_FILES, MOST_BENCHMARK_LINES, MOST_WORDS_IN_DOCS = 127_500, 836, 3_900, 59_800

# Formulas that were once in several files: what each decides, how its code looks, where, and in how many at most.
FORMULAS = (
    (
        "what kind of snapshot a policy was given",
        r"isinstance\([^)]*(Snapshot|Queue|Table)\b",
        "cluster/decide",
        0,
    ),
    ("whether a request kept its SLO", r"[<>]=? self\.(_?slo\.)?(ttft|itl|tpot|e2e)_s\b", "", 2),
    (
        "how many tasks fit a node",
        r"//\s*(job|request|task)\.(gpus_per_task|cpu_milli|memory_mib)\b",
        "cluster",
        1,
    ),
    ("the dominant share of a tenant", r"max\([^()]*gpu\w* / [^()]*, [^()]*(cpu|core)\w* / ", "cluster", 1),
    ("the time of a step, learnt", r"^class \w*(Learnt|Learned|StepPace|StepModel|StepCost)\b", "engine", 2),
    ("the option max_tokens_per_step", r"^ +max_tokens_per_step: int.* = ", "", 2),
    ("the schema of a chat request", r"^class \w*Chat\w*Request\b|^class ChatRequest\b", "serve", 1),
    ("a quantile", r"\b(np|numpy|torch)\.(quantile|percentile)\(|statistics\.quantiles\(", "", 1),
    ("how many bytes a GiB has", r"^\w*, ?_?GIB\b.*=|^_?GIB\b.*=", "", 1),
    ("the start of an SVG picture", r"[\"']<svg ", "", 2),
)


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


def budgets() -> Iterator[str]:
    """Rooms, the package, benchmarks and docs that outgrew their budget."""
    lines: dict[str, int] = defaultdict(int)
    for path in modules().values():
        room = path.relative_to(ROOT).parts[1]
        lines["errors.py and the like" if room.endswith(".py") else room] += _lines(path)
    sums = {f"cumulo/{room}": (lines[room], most, "lines") for room, most in LINES_PER_ROOM.items()}
    sums["cumulo"] = (sum(lines.values()), MOST_LINES, "lines")
    sums["cumulo "] = (len(modules()), MOST_FILES, "modules")
    benchmarks = sum(_lines(path) for path in (ROOT / "benchmarks").rglob("*.py"))
    sums["benchmarks"] = (benchmarks, MOST_BENCHMARK_LINES, "lines")
    words_in_docs = sum(len(path.read_text("utf-8").split()) for path in (ROOT / "docs").rglob("*.md"))
    sums["docs"] = (words_in_docs, MOST_WORDS_IN_DOCS, "words")
    for place, (found, most, unit) in sums.items():
        if found > most:
            yield f"{place} has {found:,} {unit}, {most:,} at most: simplify, or raise it with a user's reason"
    for room in sorted(lines.keys() - LINES_PER_ROOM.keys()):
        yield f"cumulo/{room} has no line budget: add one to LINES_PER_ROOM"


def _lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def words() -> Iterator[str]:
    """Docstrings, and help texts of options and metrics, that begin as no sentence does."""
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for text in _texts(node):
                if FRAGMENT.match(text):
                    place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                    yield f"{place} says {text.splitlines()[0][:60]!r}: write a whole sentence, subject first"


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ""
    if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
        yield str(node.value.value)
    if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in METRICS:
        yield from (str(given.value) for given in node.args[1:2] if isinstance(given, ast.Constant))


def formulas() -> Iterator[str]:
    """Formulas that are in more places than they may."""
    for what, looks, room, most in FORMULAS:
        files = [
            str(path.relative_to(ROOT))
            for path in modules().values()
            if path.is_relative_to(ROOT / "cumulo" / room)
            and re.search(looks, path.read_text("utf-8"), re.MULTILINE)
        ]
        if len(files) > most:
            yield f"{what} is in {len(files)} files, {most} at most: {', '.join(files)}; say it once"


CHECKS = {check.__name__: check for check in (budgets, words, circles, folders, names, formulas)}


def main(wanted: list[str]) -> int:
    found = [line for name in wanted or CHECKS for line in CHECKS[name]()]
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
