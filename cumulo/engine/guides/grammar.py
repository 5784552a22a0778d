"""A guide as llguidance's language, and the bounds of its form. Used by `guided` and by its worker process.

Nothing here needs torch or a tokenizer: the worker that tries guides out starts in a moment.
"""

import json
import re
from typing import Any

from cumulo.engine.decide.params import Guide
from cumulo.engine.guides.schema import enforceable
from cumulo.errors import InvalidRequest

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
        if (lines := source.count("\n") + 1) > MAX_GRAMMAR_LINES:
            raise refusal(guide, f"it has {lines:,} lines; at most {MAX_GRAMMAR_LINES} are accepted")
    else:
        schema = {"type": "object"} if guide.kind == "json_object" else _read_schema(guide)
        source = f"start: %json {json_schema_text(schema)}"
    # The options come last: the positions in error messages stay those of the user's text.
    return f"{source}\n{_OPTIONS}\n"


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
