"""Plain data into dataclasses, strictly: unknown, missing and mistyped entries are refused by name.

Training configurations, plans, job files, model specs and the catalogue are read with it. YAML is read with keys
that are given twice refused, and what is wrong is said in one line.
"""

import csv
import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

from cumulo.base.files import read_text_file
from cumulo.base.nearest import did_you_mean
from cumulo.errors import ConfigError, CumuloError

T = TypeVar("T")


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class _Reader:
    error: type[CumuloError]
    by_hand: bool  # text may stand for a number, and one item for a list of one

    def build(self, kind: type[T], data: Any, where: str) -> T:
        if not isinstance(data, Mapping):
            raise self.error(f"{where} must be a table of settings, got {data!r}")
        fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        if unknown := [str(name) for name in data if name not in fields]:
            near = did_you_mean(unknown[0], fields, quoted=True)
            raise self.error(f"{where} has no setting {unknown[0]!r}{near}")
        if missing := [
            name
            for name, field in fields.items()
            if name not in data and field.default is field.default_factory is dataclasses.MISSING
        ]:
            raise self.error(f"{where} lacks {', '.join(missing)}: add it")
        hints = typing.get_type_hints(kind)
        return kind(
            **{name: self.value(hints[name], content, f"{where}.{name}") for name, content in data.items()}
        )

    def value(self, hint: Any, content: Any, where: str) -> Any:
        """`content` as the field's type wants it; YAML and JSON have no tuples and write 1.0 as 1."""
        origin, options = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            if content is None and type(None) in options:
                return None
            (inner,) = (option for option in options if option is not type(None))
            return self.value(inner, content, where)
        if origin is typing.Literal:
            if content in options:
                return content
            text = content if isinstance(content, str) else repr(content)
            raise self.error(f"{where} cannot be {text}{did_you_mean(text, map(str, options), quoted=True)}")
        if origin is tuple and (self.by_hand or isinstance(content, (list, tuple))):
            items = content if isinstance(content, (list, tuple)) else [content]
            return tuple(
                self.value(options[0], item, f"{where}[{index}]") for index, item in enumerate(items)
            )
        if origin is Mapping and isinstance(content, Mapping):
            return {
                str(name): self.value(options[1], value, f"{where}.{name}") for name, value in content.items()
            }
        if dataclasses.is_dataclass(hint):
            return self.build(typing.cast(type[Any], hint), content, where)
        if hint is float and (number := _number(content, self.by_hand)) is not None:
            return number
        if origin is None and type(content) is hint:
            return content
        kind = _KINDS.get(hint, "a list" if origin is tuple else getattr(hint, "__name__", hint))
        raise self.error(f"{where} must be {kind}, got {content!r}")


def build(
    kind: type[T],
    data: Any,
    where: str,
    error: type[CumuloError] = ConfigError,
    by_hand: bool = True,
) -> T:
    """An instance of dataclass `kind` from a table; `where` is what errors call the table. `by_hand`: a person
    wrote it, so that text may stand for a number, and one item for a list of one."""
    return _Reader(error, by_hand).build(kind, data, where)


def _number(content: Any, by_hand: bool) -> float | None:
    if isinstance(content, (int, float)) and not isinstance(content, bool):
        return float(content)
    try:
        # YAML reads 3e-4 as text: its numbers must have a point. Everyone means the number.
        return float(content) if by_hand and isinstance(content, str) else None
    except ValueError:
        return None


class _UniqueKeys(yaml.SafeLoader):
    """A key that is given twice is an error: YAML itself would drop the first one without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """`yaml.safe_load`, with an error for keys that are given twice."""
    try:
        return yaml.load(text, _UniqueKeys)
    except RecursionError:
        raise yaml.YAMLError("its brackets are nested too deeply") from None
    except ValueError as error:  # what looks like a date and is none
        raise yaml.YAMLError(str(error)) from None


def read_yaml(path: Path, what: str = "") -> Any:
    """The content of a user's YAML file; `what` as in `read_text_file`."""
    text = read_text_file(path, what)
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        reason = f"it is not valid YAML: {yaml_problem(error)}"
        raise ConfigError(f"cannot read {what}{what and ' '}{path}: {reason}") from error


def set_value(name: str, text: str) -> Any:
    """The value of `--set NAME=TEXT`."""
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {name}={text:.80} is not valid YAML: {yaml_problem(error)}") from error


def package_text(package: str, path: str) -> str:
    """A file that ships in a package: `package_text("cumulo.plan", "data/cluster_report.html")`."""
    return resources.files(package).joinpath(path).read_text("utf-8")


@cache
def package_yaml(package: str, path: str) -> Any:
    """The content of a YAML file that ships in a package; nobody may change it."""
    # The C parser reads it in a fifth of the time, which is most of what `cumulo plan` starts with.
    return yaml.load(package_text(package, path), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def package_csv(package: str, path: str) -> list[dict[str, str]]:
    """The lines of a CSV file that ships in a package, by the names of its columns."""
    return list(csv.DictReader(package_text(package, path).splitlines()))


def yaml_problem(error: Any) -> str:
    """The place and reason of a `yaml.YAMLError`: the line, the column and the reason, without the parser's own
    words for its input."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split())
    reason = problem.replace("'<stream end>'", "the end of the file").replace(
        "<stream end>", "the end of the file"
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {reason}"
