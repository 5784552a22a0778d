"""Manifests as they are written: YAML documents with the line of every field, so that a problem can be found. Read
by the check.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cumulo.base.files import read_text_file
from cumulo.errors import ConfigError

FieldPath = tuple[str | int, ...]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class ManifestProblem:
    """What is wrong, and where."""

    file: str
    line: int  # from 1; 0: not known
    subject: str  # "Deployment/llm"
    path: str  # "spec.template.spec.containers[0].image"; empty: the whole object
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.subject}{' ' + self.path if self.path else ''}: {self.message}"


@dataclass(slots=True)
class Manifest:
    """One object. `problems` collects what is found."""

    file: str
    body: dict[str, Any]
    lines: Mapping[FieldPath, int] = field(default_factory=dict)
    problems: list[ManifestProblem] = field(default_factory=list)
    sound: bool = True  # its fields have the types of its schema: other checks may read them

    @property
    def api_version(self) -> str:
        return str(self.body.get("apiVersion", ""))

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def kind(self) -> str:
        return str(self.body.get("kind", ""))

    @property
    def metadata(self) -> Mapping[str, Any]:
        found = self.body.get("metadata")
        return found if isinstance(found, dict) else {}

    @property
    def name(self) -> str:
        return str(self.metadata.get("name") or self.metadata.get("generateName", ""))

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace") or "default")

    @property
    def subject(self) -> str:
        return f"{self.kind or 'object'}/{self.name or '?'}"

    def value(self, *path: str | int) -> Any:
        """The field there; None where there is none."""
        found: Any = self.body
        for step in path:
            if isinstance(found, dict):
                found = found.get(step)
            elif isinstance(found, list) and isinstance(step, int) and step < len(found):
                found = found[step]
            else:
                return None
        return found

    def blame(self, path: FieldPath, message: str) -> None:
        line, shown = 0, path
        while not (line := self.lines.get(shown, 0)) and shown:
            shown = shown[:-1]
        found = ManifestProblem(self.file, line, self.subject, shown_path(path), message)
        if found not in self.problems:
            self.problems.append(found)

    def matches(self, pattern: FieldPath, start: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
        """The fields below `start` that a pattern names, such as ("spec", "rules", "*", "host")."""
        found = [start]
        for step in pattern:
            if step == "*":
                found = [
                    (*path, number)
                    for path in found
                    if isinstance(items := self.value(*path), list)
                    for number in range(len(items))
                ]
            else:
                found = [(*path, step) for path in found]
        return ((path, self.value(*path)) for path in found if self.value(*path) is not None)


def shown_path(path: FieldPath) -> str:
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif "." in step or "/" in step:
            text += f"[{step!r}]"
        else:
            text += f".{step}" if text else step
    return text


def manifest_files(paths: list[Path]) -> list[Path]:
    """The files; of folders, all YAML and JSON files in them."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            for chart in path.rglob("Chart.yaml"):
                render = f"helm template {chart.parent} | cumulo kubernetes check -"
                raise ConfigError(f"{chart.parent} is a Helm chart, which Helm renders: {render}")
            inside = sorted(one for one in path.rglob("*") if one.suffix in (".yaml", ".yml", ".json"))
            if not inside:
                raise ConfigError(f"{path} contains no .yaml, .yml or .json file")
            found += inside
        else:
            found.append(path)
    return found


def read_manifests(path: Path) -> list[Manifest]:
    """All objects of a file; `-` is the standard input."""
    text = sys.stdin.read() if str(path) == "-" else read_text_file(path)
    return parse_manifests(text, str(path))


def parse_manifests(text: str, file: str) -> list[Manifest]:
    """All objects of a file, those inside a List too. Broken YAML is a problem of an object without a kind."""
    found: list[Manifest] = []
    try:
        for node in yaml.compose_all(text, _LOADER):
            if node is not None and node.tag != "tag:yaml.org,2002:null":
                found += _manifests_of(node, file)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        words = str(getattr(error, "problem", None) or error)
        broken = Manifest(file, {})
        broken.problems.append(
            ManifestProblem(file, mark.line + 1 if mark else 0, "file", "", f"is not valid YAML: {words}")
        )
        found.append(broken)
    return found


def _manifests_of(node: yaml.Node, file: str) -> Iterator[Manifest]:
    lines: dict[FieldPath, int] = {}
    repeated: list[FieldPath] = []
    body = _value(node, (), lines, repeated)
    if not isinstance(body, dict):
        made = Manifest(file, {}, lines)
        made.blame(
            (), f"an object is a mapping with apiVersion and kind, and this is a {type(body).__name__}"
        )
        yield made
        return
    items = body.get("items")
    if body.get("kind") == "List" and isinstance(items, list):
        for number, item in enumerate(items):
            start = ("items", number)
            inner = {path[2:]: line for path, line in lines.items() if path[:2] == start}
            yield Manifest(file, item if isinstance(item, dict) else {}, inner)
        return
    made = Manifest(file, body, lines)
    for path in repeated:
        made.blame(path, "is given twice; the first one would be lost")
    yield made


def _value(node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int], repeated: list[FieldPath]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(_scalar(key_node))  # kubectl reads 8080: as "8080":
            inner = (*path, key)
            if key in made:
                repeated.append(inner)
            lines[inner] = key_node.start_mark.line + 1
            made[key] = _value(value_node, inner, lines, repeated)
        return made
    if isinstance(node, yaml.SequenceNode):
        return [_value(one, (*path, number), lines, repeated) for number, one in enumerate(node.value)]
    return _scalar(node)


def _scalar(node: yaml.Node) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        return str(node.value)
    maker = yaml.SafeLoader("")
    try:
        made = maker.construct_object(node)
    except (yaml.YAMLError, ValueError):
        made = str(node.value)
    finally:
        maker.dispose()
    # Kubernetes has no dates: `2024-01-01` without quotes is text there.
    return made if isinstance(made, str | int | float | bool | None) else str(node.value)
