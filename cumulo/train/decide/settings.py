"""The reference of all settings of a training run: their defaults as YAML, with the comments that stand beside them
in the code. `cumulo train --settings` prints it, and a page of the docs contains it."""

import dataclasses
import inspect
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from typing import Any

import yaml

from cumulo.train.decide.config import TrainConfig

WIDTH = 110


def settings_text() -> str:
    return "\n".join(_table(TrainConfig, "")) + "\n"


def _table(kind: type[Any], indent: str) -> Iterator[str]:
    """A dataclass as a YAML table. One that a field can do without is shown as a comment, so that the text stays a
    configuration that can be used."""
    comments, hints = _comments(kind), typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        default = _default(field)
        told = [comments.get(field.name, "")]
        kinds = [one for one in _options(hints[field.name]) if dataclasses.is_dataclass(one)]
        inner: type[Any] | None = next((one for one in kinds if isinstance(one, type)), None)
        if inner is not None:
            told.insert(0, " ".join((inner.__doc__ or "").split()))
        elif choices := _choices(hints[field.name]):
            told.append(f"({choices})")
        comment = " ".join(part for part in told if part)
        line = f"{indent}{field.name}:" + (f" {_plain(default)}" if inner is None or default is None else "")
        if inner is None and len(line) + len(comment) + 4 <= WIDTH:
            yield f"{line}  # {comment}" if comment else line
        else:
            if inner is not None:
                yield indent.rstrip()
            start = f"{indent}# "
            yield from textwrap.wrap(comment, WIDTH, initial_indent=start, subsequent_indent=start)
            yield line
        if inner is not None:
            below = _table(inner, "  ")
            yield from (f"{indent}{'#' if default is None else ''}{one}" for one in below)


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "(required)" if field.default is dataclasses.MISSING else field.default


def _plain(value: Any) -> str:
    """A value as YAML writes it in a line."""
    content = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(content, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _choices(hint: Any) -> str:
    for option in (*_options(hint), *typing.get_args(hint)):
        if typing.get_origin(option) is typing.Literal:
            return ", ".join(map(str, typing.get_args(option)))
    return ""


def _comments(kind: type[Any]) -> dict[str, str]:
    """What the comments above a field and behind it say, by the field's name."""
    found: dict[str, str] = {}
    above: list[str] = []
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(kind)).readline):
        text = token.string.removeprefix("#").strip()
        is_alone = not token.line[: token.start[1]].strip()
        if token.type == tokenize.COMMENT and is_alone:
            above.append(text)
        elif token.type == tokenize.COMMENT:
            found[name] = " ".join([*found.get(name, "").split(), text])
        elif token.type == tokenize.NAME and is_alone and token.start[1] == 4:
            name = text
            if above:
                found[name], above = " ".join(above), []
    return found
