"""Strict: the base of every request body. A field that is unknown or not supported is refused by name.

Neutral values are no request for anything: null for any field that OpenAI's API has and this server has not, and
the few defaults named in `neutral`, are taken as left out. 4.0 is an integer, as JSON Schema has it. Parts of a
body with `ignores_unknown` (messages, their parts and calls, tools) leave out what they do not know, and the
client is warned: libraries hand back messages with fields of their own. In lenient mode every body does.
Validation stops at the first wrong item of a list, and counts a dictionary before it looks at its items: pydantic
collects all errors before it tells any, and there may be a million.
"""

from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from cumulo.base.nearest import nearest
from cumulo.serve.bodies import warnings


def stopping_early(schema: Any) -> Any:
    """A validation schema in which lists stop at their first wrong item, and dictionaries are counted before their
    items are looked at."""
    if isinstance(schema, list | tuple):
        return type(schema)(stopping_early(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    early = {name: part if name == "metadata" else stopping_early(part) for name, part in schema.items()}
    if early.get("type") == "list":
        early["fail_fast"] = True
    if early.get("type") == "dict" and early.get("max_length") is not None:
        return core_schema.no_info_before_validator_function(_counted(early["max_length"]), early)
    return early


def _counted(most: int) -> Any:
    def count(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            told = {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", told)
        return value

    return count


_LONGEST_MADE_WHOLE = 65_536


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Fields of OpenAI's API that are not supported, each with the values that ask for nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    instead: ClassVar[
        dict[str, str]
    ] = {}  # what to do instead of using such a field, where there is more to say
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
        aliases = {field.alias for field in cls.model_fields.values()}
        kept, unknown = {}, []
        for name, value in data.items():
            if name in cls.neutral:
                if value is not None and not any(
                    type(value) is type(harmless) and value == harmless for harmless in cls.neutral[name]
                ):
                    raise PydanticCustomError(
                        "unsupported",
                        "'{name}' is not supported by this server; {instead}",
                        {"name": name, "instead": cls.instead.get(name, "leave it out")},
                    )
            elif name in cls.model_fields or name in aliases:
                kept[name] = _whole(value)
            else:
                unknown.append(name)
        lenient = notes is not None and notes.lenient
        if unknown and not lenient:
            cls._refuse_misspelt(unknown[0], data if cls.ignores_unknown else {})
        if unknown and not (lenient or cls.ignores_unknown):
            kept[unknown[0]] = data[unknown[0]]  # refused by pydantic, after what is wrong with known fields
        elif notes is not None:
            for name in unknown:
                notes.ignore(data, name)
        return kept

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


def kind_of(value: Any, default: str = "") -> str:
    """The `type` of an object in a body, or of a part that has been read already."""
    kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
    return kind if isinstance(kind, str) else ""


def of_type(*known: str, words: str) -> BeforeValidator:
    """Objects whose `type` is none of these are refused in words of their own, with {kind} and {known} in them."""

    def check(value: Any) -> Any:
        kind = kind_of(value)
        if kind and kind not in known:
            told = {"kind": writable(kind[:64]), "known": " or ".join(f"'{one}'" for one in known)}
            raise PydanticCustomError("unsupported_kind", words, told)
        return value

    return BeforeValidator(check)


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
