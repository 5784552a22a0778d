"""Whether a text is a JSON value that fits its schema: jsonschema, made exact. For `cumulo bench guided` and tests.

jsonschema computes with floats, for which 691.7787 is no multiple of 0.0001, and reads patterns as Python does,
for which `é` is no `\\W` and a line break may follow `$`. Here numbers are fractions and patterns ECMA's (262,
section 22.2), as the specification wants.
"""

import json
import re
from fractions import Fraction
from typing import Any

from cumulo.bench.schema_suite import DRAFTS
from cumulo.errors import CumuloError

_SPACE = r"\t\n\x0b\f\r \u00a0\ufeff\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": _SPACE}
_LARGEST_EXPONENT_DIGITS = 4


class CannotJudge(Exception):
    """The schema holds a pattern that Python has no words for."""


class Judge:
    """Of one schema. Formats that are known must be kept, too."""

    def __init__(self, schema: dict[str, Any], draft: str) -> None:
        try:
            from jsonschema import validators
        except ImportError as error:
            raise CumuloError(
                "judging answers needs jsonschema: pip install -e '.[bench]' in Cumulo's folder"
            ) from error
        kind = validators.validator_for({"$schema": DRAFTS[draft]})
        exact = json.loads(json.dumps(_with_python_patterns(schema)), parse_float=_number)
        self._validator = kind(exact, format_checker=kind.FORMAT_CHECKER)

    def complaint(self, text: str) -> str | None:
        """Why the text is no such value; None: it is one."""
        try:
            value = json.loads(text, parse_float=_number)
        except ValueError as error:
            return f"not JSON: {error}"
        fault = next(iter(self._validator.iter_errors(value)), None)
        return None if fault is None else str(fault.message)


def _number(text: str) -> Fraction | int | float:
    if len(text.lower().partition("e")[2]) > _LARGEST_EXPONENT_DIGITS:
        return float(text)  # zero or infinity: its digits would fill the memory
    value = Fraction(text)
    return int(value) if value.denominator == 1 else value


def _with_python_patterns(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_python_patterns(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    copy = {word: _with_python_patterns(inner) for word, inner in value.items()}
    if isinstance(value.get("pattern"), str):
        copy["pattern"] = python_pattern(value["pattern"])
    if isinstance(named := copy.get("patternProperties"), dict):
        copy["patternProperties"] = {python_pattern(pattern): inner for pattern, inner in named.items()}
    return copy


def python_pattern(pattern: str) -> str:
    """ECMA's pattern in Python's words."""
    pieces: list[str] = []
    in_class = False
    for piece in re.findall(r"\\.|.", pattern, re.DOTALL):
        if piece.lower() in _CLASSES:
            body, negated = _CLASSES[piece.lower()], piece[1].isupper()
            if in_class and negated:
                raise CannotJudge(pattern)
            piece = body if in_class else f"[{'^' if negated else ''}{body}]"
        elif piece == "$" and not in_class:
            piece = r"\Z"
        elif piece == "." and not in_class:
            piece = r"[^\n\r\u2028\u2029]"
        elif piece == "[":
            piece, in_class = r"\[" if in_class else "[", True
        elif piece == "]":
            in_class = False
        pieces.append(piece)
    translated = "".join(pieces)
    try:
        re.compile(translated)
    except re.error as error:
        raise CannotJudge(pattern) from error
    return translated
