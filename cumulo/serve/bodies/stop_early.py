"""Validation that stops at the first mistake where there may be a million. Used by Strict, for every request body.

Pydantic collects all errors of a list and of a dictionary before it tells any; a client is told one. And it holds
the interpreter while it goes through a list of numbers: long ones, prompts given as tokens, are checked in pieces.
"""

from typing import Annotated, Any

import msgspec
from pydantic_core import PydanticCustomError, PydanticKnownError, core_schema

_LONG = 4_096
_PIECE = 16_384


def stopping_early(schema: Any) -> Any:
    """A validation schema in which lists stop at their first wrong item, dictionaries are counted before items
    are looked at, and long lists of numbers do not hold up other threads."""
    if isinstance(schema, list):
        return [stopping_early(part) for part in schema]
    if isinstance(schema, tuple):
        return tuple(stopping_early(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    early = {name: part if name == "metadata" else stopping_early(part) for name, part in schema.items()}
    if early.get("type") == "list":
        early["fail_fast"] = True
        items = early.get("items_schema") or {}
        if items.get("type") == "int" and "ge" in items and "lt" in items:
            check = _checked_in_pieces(items["ge"], items["lt"], early.get("max_length"))
            return core_schema.no_info_wrap_validator_function(check, early)
    if early.get("type") == "dict" and early.get("max_length") is not None:
        return core_schema.no_info_before_validator_function(_counted(early["max_length"]), early)
    return early


def _counted(most: int) -> Any:
    def count(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise _too_long("Dictionary", most, len(value))
        return value

    return count


def _checked_in_pieces(least: int, below: int, most: int | None) -> Any:
    integers = list[Annotated[int, msgspec.Meta(ge=least, lt=below)]]

    def check(value: Any, handler: core_schema.ValidatorFunctionWrapHandler) -> Any:
        if type(value) is not list or len(value) <= _LONG:
            return handler(value)
        if most is not None and len(value) > most:
            raise _too_long("List", most, len(value))
        for start in range(0, len(value), _PIECE):
            try:
                msgspec.convert(value[start : start + _PIECE], integers)
            except msgspec.ValidationError:
                raise PydanticCustomError(
                    "no_integers",
                    "a number among items {start} to {end} is no integer from {least} to {most}",
                    {
                        "start": start,
                        "end": min(len(value), start + _PIECE) - 1,
                        "least": least,
                        "most": below - 1,
                    },
                ) from None
        return value

    return check


def _too_long(kind: str, most: int, actual: int) -> PydanticKnownError:
    return PydanticKnownError("too_long", {"field_type": kind, "max_length": most, "actual_length": actual})
