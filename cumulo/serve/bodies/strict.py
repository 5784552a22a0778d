"""Strict: the base of every request body. A field that is unknown or not supported is refused by name.

Neutral values are no request for anything: null for any field that OpenAI's API has and this server has not, and
the few defaults named in `neutral`, are taken as left out. 4.0 is an integer, as JSON Schema has it. Parts of a
body with `ignores_unknown` (messages, their parts and calls, tools) leave out what they do not know, and the
client is warned: libraries hand back messages with fields of their own. In lenient mode every body does.
Validation stops at the first wrong item of a list, and counts a dictionary before it looks at its items: pydantic
collects all errors before it tells any, and there may be a million. It holds the interpreter while it goes through
a list of numbers, so long ones, prompts given as tokens, are checked in pieces.
"""

from typing import Annotated, Any, ClassVar, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from cumulo.base.nearest import nearest
from cumulo.serve.bodies import warnings

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


_LONGEST_MADE_WHOLE = 65_536


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Fields of OpenAI's API that are not supported, each with the values that ask for nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    ignores_unknown: ClassVar[bool] = False

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = stopping_early(handler(source))
        return schema

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The description says of what is ignored that it may be there."""
        schema = handler(core_schema)
        if cls.ignores_unknown:
            handler.resolve_ref_schema(schema).pop("additionalProperties", None)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        notes = warnings.current()
        if notes is not None:
            notes.begin(data)
        kept = {}
        unknown = []
        for name, value in data.items():
            if name in cls.neutral:
                if value is not None and not any(
                    type(value) is type(harmless) and value == harmless for harmless in cls.neutral[name]
                ):
                    raise PydanticCustomError(
                        "unsupported",
                        "'{name}' is not supported by this server; leave it out",
                        {"name": name},
                    )
            elif name in cls.model_fields:
                kept[name] = _whole(value)
            else:
                unknown.append(name)
        if unknown:
            aliases = {field.alias for field in cls.model_fields.values()}
            for name in [name for name in unknown if name in aliases]:
                unknown.remove(name)
                kept[name] = _whole(data[name])
        if unknown:
            cls._tell_unknown(data, unknown, kept, notes)
        return kept

    @classmethod
    def _tell_unknown(
        cls, data: dict[str, Any], unknown: list[str], kept: dict[str, Any], notes: warnings.Notes | None
    ) -> None:
        """Ignore unknown fields with a warning, or refuse the first: one error is told."""
        if notes is not None and notes.lenient:
            ignored = True
        else:
            ignored = cls.ignores_unknown
            cls._refuse_misspelt(unknown[0], data if ignored else {})
        if not ignored:
            kept[unknown[0]] = data[unknown[0]]  # refused by pydantic, after what is wrong with known fields
        elif notes is not None:
            for name in unknown:
                notes.ignore(data, name)

    @classmethod
    def _refuse_misspelt(cls, name: str, given: dict[str, Any]) -> None:
        """An unknown name that is nearly a known one which is not among those `given`."""
        known = [field.alias or one for one, field in cls.model_fields.items()]
        if len(name) > 64:
            return
        for near in nearest(name, [one for one in known if one not in given], 1, 0.75):
            raise PydanticCustomError(
                "misspelt",
                "'{name}' is not a field this server knows; did you mean '{near}'?",
                {"name": writable(name), "near": near},
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
                {"kind": writable(kind[:64]), "kinds": " or ".join(f"'{known}'" for known in kinds)},
            )
        return data


def writable(text: str) -> str:
    """JSON may hold half a surrogate pair, which has no UTF-8 to put into a message."""
    return text.encode("utf-8", "backslashreplace").decode()


def _whole(value: Any, depth: int = 2) -> Any:
    """JSON has one kind of number: what is written 4.0 may stand where an integer is wanted, also in lists. No
    field is a list of lists of lists; whatever goes deeper is not touched, nor are lists that take long."""
    if type(value) is float and value.is_integer():
        return int(value)
    if (
        type(value) is list
        and depth
        and len(value) <= _LONGEST_MADE_WHOLE
        and not {float, list}.isdisjoint(set(map(type, value)))
    ):
        return [_whole(item, depth - 1) for item in value]
    return value
