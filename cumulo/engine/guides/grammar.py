"""A guide as llguidance's language, and the bounds of its form. Used by `guided` and by its worker process.

Nothing here needs torch or a tokenizer: the worker that tries guides out starts in a moment.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from cumulo.engine.decide.params import Guide
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
    copy: dict[str, Any] = json.loads(json.dumps(schema))
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


# A guide comes from a stranger: its form is bounded here, what compiling it takes by its worker's limits.
MAX_SOURCE_CHARACTERS = 128 * 1024
MAX_REGEX_CHARACTERS = 16 * 1024
MAX_GRAMMAR_LINES = 500  # the time for chains of terminals grows with the cube of their number
MAX_PROPERTIES = 1000  # of one object; the time grows with their square
# Between JSON tokens: nothing, a space, or a line break with its indentation. Unbounded white space is where
# small models get lost: they indent until max_tokens.
JSON_WHITESPACE = r"[ ]|\n([ ]{0,32}|\t{0,8})"
# Without \uXXXX: a name spelt that way would pass for another one, and escape the schema of its property. Other
# characters are written as they are; only schemas that name control characters themselves need the escape.
_ESCAPES = 'nrbtf\\"'
_NAMES_CONTROL_CHARACTER = re.compile(r"\\u00[01]|\\\\(?:x[01]|u00[01]|[ux]\{|c[A-Za-z]|0)")
# Forced stretches are left to the model, too: llguidance would spell them out by calling our tokenizer, under
# the interpreter's lock and in time proportional to their length, at every step.
_OPTIONS = '%llguidance {"no_forcing": true}'
_LLAMA_RULE = re.compile(r"(\s|#.*\n)*[A-Za-z0-9_-]+\s*::=")
_NAMES = {
    "json_object": "JSON",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
}


def grammar_text(guide: Guide) -> str:
    """The guide as a Lark grammar, or InvalidRequest where that shows already that it cannot be."""
    source, limit = guide.source, MAX_REGEX_CHARACTERS if guide.kind == "regex" else MAX_SOURCE_CHARACTERS
    if len(source) > limit:
        raise refusal(guide, f"it has {len(source):,} characters; at most {limit:,} are accepted")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise refusal(guide, f"it is no valid Unicode text (character {error.start})") from None
    if guide.kind == "regex":
        from llguidance import regex_to_lark

        # "d": \d is 0-9, as in JSON schemas, not every script's digits.
        source = f"start: /{regex_to_lark(source, 'd')}/" if source else 'start: ""'
    elif guide.kind == "grammar":
        source = _as_lark(guide)
        if (lines := source.count("\n") + 1) > MAX_GRAMMAR_LINES:
            raise refusal(guide, f"it has {lines:,} lines; at most {MAX_GRAMMAR_LINES} are accepted")
    else:
        schema = {"type": "object"} if guide.kind == "json_object" else _read_schema(guide)
        source = f"start: %json {json_schema_text(schema)}"
    # The options come last: the positions in error messages stay those of the user's text.
    return f"{source}\n{_OPTIONS}\n"


def _as_lark(guide: Guide) -> str:
    """The grammar in Lark. llama.cpp's dialect, which vLLM's clients send, too, is known by its first rule."""
    if _LLAMA_RULE.match(guide.source) is None:
        return guide.source
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(guide.source).removeprefix("%llguidance {}")
    except Exception as error:  # the library raises plain ones
        too_deep = isinstance(error, RecursionError | IndexError)
        raise refusal(
            guide, "its end is missing, or it is nested too deeply" if too_deep else str(error)
        ) from None


def json_schema_text(schema: dict[str, Any]) -> str:
    """A schema for `%json` in a grammar, with our white space unless it says otherwise. InvalidRequest where
    llguidance would pass over what it says."""
    options = {"whitespace_pattern": JSON_WHITESPACE}
    if not _NAMES_CONTROL_CHARACTER.search(json.dumps(schema)):
        options["json_allowed_escapes"] = _ESCAPES
    if isinstance(own := schema.get("x-guidance"), dict):
        options |= own
    return json.dumps({**enforceable(schema), "x-guidance": options})


def _read_schema(guide: Guide) -> dict[str, Any]:
    try:
        schema = json.loads(guide.source)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else f"not valid JSON: {error}"
        raise refusal(guide, why) from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise refusal(guide, f"a schema is a JSON object, not {json.dumps(schema)[:40]}")
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if isinstance(named := part.get("properties"), dict) and len(named) > MAX_PROPERTIES:
                raise refusal(
                    guide, f"an object in it has {len(named):,} properties, more than {MAX_PROPERTIES:,}"
                )
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)
    return schema


def refusal(guide: Guide, reason: str) -> InvalidRequest:
    """llguidance's reason without what shows our wrapping rather than the user's text."""
    if guide.kind != "grammar":
        reason = re.split(r"\n +\d+ \| ", re.sub(r"^at \d+\(\d+\): ", "", reason))[0]
    kept = [line for line in reason.splitlines() if "<non-verbose/>" not in line and _OPTIONS not in line]
    reason = "\n".join(kept).strip()
    if len(reason) > 500:
        reason = reason[:500] + " ..."
    return InvalidRequest(f"this {_NAMES[guide.kind]} cannot guide an answer: {reason}")
