"""A Helm chart read without Helm: its templates with the values filled in, so that the check sees objects. Charts
that Cumulo writes need nothing more; what only Helm can render is named.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import Manifest, ManifestProblem, parse_manifests
from cumulo.errors import ConfigError

_ACTION = re.compile(r"\{\{-?\s*(.*?)\s*-?\}\}", re.S)
_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\S+')
_OF_CHART = {"Name": "name", "Version": "version", "AppVersion": "appVersion"}


class _Unknown(Exception):
    """What a template says and this does not understand, or values that are not there."""


def chart_folders(paths: Sequence[Path]) -> list[Path]:
    """Folders with a chart, among the given ones and below them."""
    return sorted({file.parent for path in paths if path.is_dir() for file in path.rglob("Chart.yaml")})


def read_chart(folder: Path) -> list[Manifest]:
    """The objects of its templates, and what is wrong with the chart itself."""
    found: list[Manifest] = []
    chart = _mapping(folder / "Chart.yaml", found)
    values = _mapping(folder / "values.yaml", found) if (folder / "values.yaml").exists() else {}
    for name, known in (("apiVersion", ("v1", "v2")), ("name", ()), ("version", ())):
        if not chart.get(name):
            _blame(found, folder / "Chart.yaml", 0, f"{name} is required and missing")
        elif known and chart[name] not in known:
            _blame(found, folder / "Chart.yaml", 0, f"{name} must be v2 or v1, got {chart[name]}")
    templates = sorted((folder / "templates").rglob("*.y*ml"))
    if not templates:
        _blame(found, folder / "Chart.yaml", 0, "the chart has no templates")
    facts = {"Values": values, "Chart": {key: chart.get(name) for key, name in _OF_CHART.items()}}
    facts["Release"] = {
        "Name": str(chart.get("name") or "release"),
        "Namespace": "default",
        "Service": "Helm",
    }
    for path in templates:
        found += _rendered(path, facts, found)
    return found


def _rendered(path: Path, facts: Mapping[str, Any], problems: list[Manifest]) -> list[Manifest]:
    text, notes, whole = path.read_text("utf-8"), {}, True

    def fill(match: re.Match[str]) -> str:
        nonlocal whole
        line = text.count("\n", 0, match.start()) + 1
        try:
            value = _evaluated(match[1], facts)
        except _Unknown as error:
            whole = False
            _blame(problems, path, line, str(error))
            return "null"
        for name in re.findall(r"\.Values\.([\w.]+)", match[1]):
            notes[line] = f" ({name} in values.yaml)"
        return value + "\n" * match[0].count("\n")  # lines stay where they are

    filled = _ACTION.sub(fill, text)
    if not whole:
        return []
    made = parse_manifests(filled, str(path))
    for one in made:
        one.notes = notes
    return made


def _evaluated(action: str, facts: Mapping[str, Any]) -> str:
    """`.Values.replicas | default 2 | quote`, and a literal; comments are nothing."""
    if action.startswith("/*"):
        return ""
    first, *pipes = (part.strip() for part in re.split(r'\|(?=(?:[^"]*"[^"]*")*[^"]*$)', action))
    words = _WORD.findall(first)
    if words[:1] in (["quote"], ["int"], ["toString"]) and len(words) == 2:
        pipes, words = [words[0], *pipes], words[1:]
    usual = next((part.split(None, 1)[1] for part in pipes if part.startswith("default ")), None)
    if len(words) != 1:
        raise _Unknown(_only_helm(action))
    value = _value(words[0], facts, action, usual)
    for part in pipes:
        if part == "quote":
            value = '"' + _plain(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
        elif part not in ("int", "toString") and not part.startswith("default "):
            raise _Unknown(_only_helm(action))
    return _plain(value)


def _value(word: str, facts: Mapping[str, Any], action: str, usual: str | None) -> Any:
    if re.fullmatch(r'"(?:\\.|[^"\\])*"|-?\d+(\.\d+)?|true|false', word):
        return yaml.safe_load(word)
    steps = word.removeprefix("$").split(".")
    if steps[0] or len(steps) < 3 or steps[1] not in facts:
        raise _Unknown(_only_helm(action))
    found: Any = facts[steps[1]]
    for step in steps[2:]:
        known = list(found) if isinstance(found, dict) else []
        if step not in known:
            if usual is not None:
                return yaml.safe_load(usual)
            there = did_you_mean(step, known) if known else ""
            where = "values.yaml has" if steps[1] == "Values" else "Helm has"
            raise _Unknown(f"uses {word}, and {where} no {'.'.join(steps[2:])}{there}")
        found = found[step]
    if isinstance(found, dict | list):
        raise _Unknown(f"uses {word}, which is not a single value: only Helm can render that")
    return found


def _only_helm(action: str) -> str:
    words = " ".join(action.split())
    return f"{{{{ {words} }}}} needs Helm: check the output of `helm template` instead of the chart"


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mapping(path: Path, problems: list[Manifest]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        words = str(getattr(error, "problem", None) or error)
        _blame(problems, path, mark.line + 1 if mark else 0, f"is not valid YAML: {words}")
        return {}
    if content is not None and not isinstance(content, dict):
        _blame(problems, path, 0, "must be a mapping")
    return content if isinstance(content, dict) else {}


def _blame(problems: list[Manifest], path: Path, line: int, message: str) -> None:
    one = Manifest(str(path), {})
    one.problems.append(ManifestProblem(str(path), line, "chart", "", message))
    problems.append(one)
