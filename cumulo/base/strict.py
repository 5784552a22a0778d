"""Plain data into dataclasses, strictly: unknown keys are refused with the nearest name. Used by `config.py`."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from cumulo.errors import ConfigError

T = TypeVar("T")


def build(kind: type[T], data: Any, where: str) -> T:
    """An instance of dataclass `kind` from a table; `where` is what errors call the table."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a table of settings, got {data!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in data:
        if name not in fields:
            raise ConfigError(f"{where} has no setting {name!r}{nearest(str(name), fields)}")
    missing = [
        name
        for name, field in fields.items()
        if name not in data
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}: add it")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: which name was meant, or which there are."""
    names = list(known)
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(names)}"


def _value(hint: Any, content: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if content is None and type(None) in options:
            return None
        (inner,) = (option for option in options if option is not type(None))
        return _value(inner, content, where)
    if origin is typing.Literal:
        if content in options:
            return content
        text = content if isinstance(content, str) else repr(content)
        raise ConfigError(f"{where} cannot be {text}{nearest(text, map(str, options))}")
    if origin is tuple:
        items = content if isinstance(content, (list, tuple)) else [content]
        return tuple(_value(options[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type[Any], hint), content, where)
    if hint is float:
        return _number(content, where)
    if type(content) is hint:
        return content
    raise ConfigError(f"{where} must be {_WORDS.get(hint, hint)}, got {content!r}")


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _number(content: Any, where: str) -> float:
    if isinstance(content, (int, float)) and not isinstance(content, bool):
        return float(content)
    try:
        # YAML reads 3e-4 as text: its numbers must have a point. Everyone means the number.
        return float(content) if isinstance(content, str) else _refuse(content, where)
    except ValueError:
        return _refuse(content, where)


def _refuse(content: Any, where: str) -> float:
    raise ConfigError(f"{where} must be a number, got {content!r}")
