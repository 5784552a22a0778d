"""What a JSON schema needs before llguidance compiles it. Called by `engine.guided` for every schema.

llguidance refuses most of what it cannot enforce. This file sees to the rest, where it would let through what
the schema does not allow: words of older drafts, misspelt ones and counts of names that may repeat are refused
by name; dates and times become patterns that know the calendar (llguidance's own take 2021-02-29 and 12:00:60);
patterns are read as ECMA 262 has them.
"""

import re
from collections.abc import Iterator
from typing import Any

from cumulo.errors import InvalidRequest

# Words that assert something elsewhere and nothing here: the draft 3 ones, and ajv's.
_FOREIGN = {
    "disallow": "JSON Schema draft 3",
    "divisibleBy": "JSON Schema draft 3; today it is multipleOf",
    "extends": "JSON Schema draft 3; today it is allOf",
    "formatMinimum": "ajv",
    "formatMaximum": "ajv",
    "formatExclusiveMinimum": "ajv",
    "formatExclusiveMaximum": "ajv",
}
_OLD_DRAFTS = ("draft-00", "draft-01", "draft-02", "draft-03")
_KEYWORDS = (
    "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "properties", "required",
    "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "items", "prefixItems",
    "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems", "maxItems",
    "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
)  # fmt: skip
_PLAIN_SPELLING = {keyword.lower(): keyword for keyword in _KEYWORDS}
# Where schemas stand inside a schema: as the value, in a list, under names.
_ONE = {
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
    "propertyNames", "not", "if", "then", "else",
}  # fmt: skip
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}

# RFC 3339, section 5.6, with the days each month has (5.7); without leap seconds, the year 0 and lower-case
# letters, which few readers take.
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_CLOCK}:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+-]{_CLOCK})"
FORMAT_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

# ECMA 262, sections 12.2, 12.3 and 22.2.2: what `.` and `\s` mean there; elsewhere they differ in rare characters.
_LINE_ENDS = r"\n\r\x{2028}\x{2029}"
_SPACES = r"\t\n\x{0b}\f\r \x{a0}\x{feff}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
# Flags and names, of which patterns in schemas have few: such a pattern is left as it is.
_OTHER_SYNTAX = re.compile(r"\(\?[^:]")


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with exact dates and times. InvalidRequest where it says what would not be enforced, unless
    its `x-guidance` is lenient: then that is passed over."""
    own = schema.get("x-guidance")
    lenient = isinstance(own, dict) and own.get("lenient") is True
    if not lenient and any(draft in str(schema.get("$schema")) for draft in _OLD_DRAFTS):
        raise _refusal(
            f"$schema names {schema['$schema']!r}; draft 4 and later are understood. Write it in a later draft"
        )
    copy: dict[str, Any] = _copy(schema)
    for part in _parts(copy):
        if not lenient:
            for word in part:
                _check_word(word)
            _check_count(part)
        _use_ecma_patterns(part)
        _use_calendar(part)
    return copy


def _check_word(word: str) -> None:
    if (origin := _FOREIGN.get(word)) is not None:
        raise _refusal(f"its keyword {word!r} ({origin}) cannot be enforced")
    meant = _PLAIN_SPELLING.get(word.replace("_", "").replace("-", "").lower())
    if meant is not None and meant != word:
        raise _refusal(f"its keyword {word!r} means nothing in a JSON schema; write {meant!r}")


def _check_count(part: dict[str, Any]) -> None:
    """The names of additional properties may repeat, and a name that repeats counts once."""
    least, required = part.get("minProperties"), part.get("required")
    distinct = len({str(name) for name in required}) if isinstance(required, list) else 0
    if isinstance(least, (int, float)) and least > distinct + 1:
        raise _refusal(
            f"minProperties {least} cannot be enforced, because names may repeat; name the properties in required"
        )


def _use_calendar(part: dict[str, Any]) -> None:
    pattern, others = FORMAT_PATTERNS.get(str(part.get("format"))), part.get("allOf", [])
    if pattern is None or not isinstance(others, list):
        return
    del part["format"]
    if "pattern" in part:  # both hold; appended, so that references into allOf stay true
        part["allOf"] = [*others, {"pattern": pattern}]
    else:
        part["pattern"] = pattern


def _use_ecma_patterns(part: dict[str, Any]) -> None:
    if isinstance(part.get("pattern"), str):
        part["pattern"] = ecma_pattern(part["pattern"])
    if isinstance(named := part.get("patternProperties"), dict):
        part["patternProperties"] = {ecma_pattern(name): schema for name, schema in named.items()}


def ecma_pattern(pattern: str) -> str:
    """The pattern in llguidance's language, where `.` and `\\s` are Unicode's."""
    if _OTHER_SYNTAX.search(pattern):
        return pattern
    pieces: list[str] = []
    in_class = False
    for piece in re.findall(r"\\.|.", pattern, re.DOTALL):
        if piece == r"\s":
            piece = _SPACES if in_class else f"[{_SPACES}]"
        elif piece == r"\S":
            piece = f"[^{_SPACES}]"
        elif piece == "." and not in_class:
            piece = f"[^{_LINE_ENDS}]"
        elif piece == "[" and not in_class:
            in_class = True
        elif piece == "]":
            in_class = False
        pieces.append(piece)
    return "".join(pieces)


def _copy(value: Any) -> Any:
    """Deep, without recursion: a schema comes from a stranger and may be nested at will."""
    root: list[Any] = [value]
    pending: list[Any] = [root]
    while pending:
        holder = pending.pop()
        for key, inner in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(inner, (dict, list)):
                holder[key] = inner.copy()
                pending.append(holder[key])
    return root[0]


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and every schema inside it; not what only looks like one, in `enum` or under other words."""
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        for word, value in part.items():
            if word in _LISTS and isinstance(value, list):
                pending.extend(value)
            elif word in _NAMED and isinstance(value, dict):
                pending.extend(value.values())
            elif word in _ONE:
                pending.append(value)
        yield part


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"this JSON schema cannot guide an answer: {reason}")
