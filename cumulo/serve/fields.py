"""Strict: the base of every request body. A field that is unknown or not supported is refused by name.

Neutral values are no request for anything: null for any field that OpenAI's API has and this server has not,
and the few defaults named in `neutral`, are taken as left out. 4.0 is an integer, as JSON Schema has it.
"""

import difflib
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Fields of OpenAI's API that are not supported, each with the values that ask for nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        unknown = None
        for name, value in data.items():
            if name not in cls.neutral:
                kept[name] = _whole(value)
                if unknown is None and name not in cls.model_fields:
                    unknown = name
            elif value is not None and not any(
                type(value) is type(harmless) and value == harmless for harmless in cls.neutral[name]
            ):
                raise PydanticCustomError(
                    "unsupported", "'{name}' is not supported by this server; leave it out", {"name": name}
                )
        if unknown is not None:
            cls._refuse_misspelt(unknown)
        return kept

    @classmethod
    def _refuse_misspelt(cls, name: str) -> None:
        """An unknown name that is nearly a known one; others are refused by pydantic. Only the first unknown one is
        looked at: comparing takes time, and one error is told."""
        known = [field.alias or one for one, field in cls.model_fields.items()]
        if name in known or len(name) > 64:
            return
        for near in difflib.get_close_matches(name, known, 1, 0.75):
            raise PydanticCustomError(
                "misspelt",
                "'{name}' is not a field this server knows; did you mean '{near}'?",
                {"name": _writable(name), "near": near},
            )


class TextOnly(Strict):
    """A part of a message. Others than text are refused in words of their own."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kinds = get_args(cls.model_fields["type"].annotation)
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise PydanticCustomError(
                "unsupported_part",
                "this server reads text only (parts of type {kinds}), not '{kind}'",
                {"kind": _writable(kind[:64]), "kinds": " or ".join(f"'{known}'" for known in kinds)},
            )
        return data


def _writable(text: str) -> str:
    """JSON may hold half a surrogate pair, which has no UTF-8 to put into a message."""
    return text.encode("utf-8", "backslashreplace").decode()


def _whole(value: Any, depth: int = 2) -> Any:
    """JSON has one kind of number: what is written 4.0 may stand where an integer is wanted, also in lists. No
    field is a list of lists of lists; whatever goes deeper is not touched."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list and depth and not {float, list}.isdisjoint(set(map(type, value))):
        return [_whole(item, depth - 1) for item in value]
    return value
