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
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from cumulo.base.nearest import nearest
from cumulo.serve.bodies import warnings
from cumulo.serve.errors import invalid


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
_LONGEST_NAME = 64


class Strict(BaseModel):
    # Other fields are kept until `settle_unknown` has looked at them.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    # Fields of OpenAI's API that are not supported, each with the values that ask for nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # What to do instead of using such a field, where there is more to say.
    instead: ClassVar[dict[str, str]] = {}
    # Fields that clients send by themselves, and that change no answer here: left out, with a warning.
    ignored: ClassVar[frozenset[str]] = frozenset()
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
        handler.resolve_ref_schema(schema)["additionalProperties"] = cls.ignores_unknown
        return schema

    @field_validator("*", mode="before")
    @classmethod
    def _with_whole_numbers(cls, value: Any) -> Any:
        return _whole(value)


def settle_unknown(body: Strict, place: str = "") -> None:
    """Forget the fields of a body and its parts that their models do not have, with a warning where it is due, or
    refuse the first one that asks for something."""
    extra = body.__pydantic_extra__
    if extra:
        unknown = [name for name, value in extra.items() if not _asks_nothing(body, place, name, value)]
        if unknown:
            _settle(body, place, unknown)
        extra.clear()
    for name, value in body.__dict__.items():
        if isinstance(value, Strict):
            settle_unknown(value, f"{place}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Strict):
                    settle_unknown(item, f"{place}{name}[{index}].")


def _asks_nothing(body: Strict, place: str, name: str, value: Any) -> bool:
    """Whether this is a field that is not supported, with a value that does not ask for it."""
    if name not in body.neutral:
        return False
    harmless = body.neutral[name]
    if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
        instead = body.instead.get(name, "leave it out")
        words = f"'{name}' is not supported by this server; {instead}"
        raise invalid(words, f"{place}{name}", "unsupported_parameter")
    return True


def _settle(body: Strict, place: str, unknown: list[str]) -> None:
    first = next((name for name in unknown if name not in body.ignored), "")
    lenient = warnings.is_lenient() or not first
    if not lenient and len(first) <= _LONGEST_NAME:
        # Where other fields are ignored, a name is misspelt only if what it is like is not there.
        given = body.model_fields_set if body.ignores_unknown else set()
        known = [field.alias or one for one, field in type(body).model_fields.items() if one not in given]
        for near in nearest(first, known, 1, 0.75):
            words = f"'{first}' is not a field this server knows; did you mean '{near}'?"
            raise invalid(words, f"{place}{first}", "unknown_parameter")
    if not lenient and not body.ignores_unknown:
        param = f"{place}{first}"
        raise invalid(f"'{param}' is not a field this server knows; leave it out", param, "unknown_parameter")
    for name in unknown:
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        warnings.warn(f"{place}{shown} is not known here and was ignored")


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
