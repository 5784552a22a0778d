"""Whether a text is a JSON value that fits its schema: jsonschema, made exact.

jsonschema computes with floats, for which 691.7787 is no multiple of 0.0001, and reads patterns as Python does,
for which `é` is no `\\W` and a line break may follow `$`. Here numbers are fractions and patterns ECMA's (262,
section 22.2), as the specification wants.
"""

import hashlib
import io
import json
import re
import tarfile
import urllib.request
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from cumulo.errors import CumuloError
from cumulo.kernels.cpu.library import default_cache_folder

_SOURCE = (
    "https://files.pythonhosted.org/packages/b3/fc/e067678238fa451312d4c62bf6e6cf5ec56375422aee02f9cb5f909b3047/"
    "jsonschema-4.26.0.tar.gz"
)
_SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
_PREFIX = "jsonschema-4.26.0/json/tests/"
_PATIENCE_S = 30.0
# By the suite's folder: the dialect a schema in it is written in, for those that do not say so themselves.
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}


@dataclass(frozen=True, slots=True)
class SuiteSchema:
    """A schema, and values that the suite says fit it or do not."""

    name: str  # draft, file and description
    draft: str  # a key of DRAFTS
    schema: dict[str, Any]
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


def load() -> list[SuiteSchema]:
    """Every schema once: what several drafts have in common is taken from the newest."""
    found: dict[str, SuiteSchema] = {}
    with tarfile.open(fileobj=io.BytesIO(_archive())) as archive:
        texts = {
            member.name.removeprefix(_PREFIX): archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if member.isfile() and member.name.startswith(_PREFIX) and member.name.endswith(".json")
        }
    for draft, dialect in DRAFTS.items():
        for path in sorted(path for path in texts if path.startswith(f"{draft}/")):
            for group in json.loads(texts[path]):
                if not isinstance(group["schema"], dict):
                    continue  # true and false
                bare = {word: value for word, value in group["schema"].items() if word != "$schema"}
                cases = group["tests"]
                found.setdefault(
                    json.dumps(bare, sort_keys=True),
                    SuiteSchema(
                        name=f"{path}: {group['description']}",
                        draft=draft,
                        schema={"$schema": dialect, **group["schema"]},
                        valid=tuple(case["data"] for case in cases if case["valid"]),
                        invalid=tuple(case["data"] for case in cases if not case["valid"]),
                    ),
                )
    return list(found.values())


def _archive() -> bytes:
    kept = default_cache_folder().parent / Path(_SOURCE).name
    if kept.is_file() and hashlib.sha256(data := kept.read_bytes()).hexdigest() == _SHA256:
        return data
    try:
        with urllib.request.urlopen(_SOURCE, timeout=_PATIENCE_S) as answer:
            data = bytes(answer.read())
    except OSError as error:
        raise CumuloError(
            f"the JSON Schema Test Suite could not be fetched from {_SOURCE} ({error}); connect to the network, or "
            f"put the file into {kept.parent}"
        ) from error
    if hashlib.sha256(data).hexdigest() != _SHA256:
        raise CumuloError(f"what came from {_SOURCE} is not the file expected: its SHA-256 differs")
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{id(data)}.part")
    part.write_bytes(data)
    part.replace(kept)  # at once: another process may look for it
    return data


_LARGEST_EXPONENT_DIGITS = 4


class CannotJudge(Exception):
    """The schema holds a pattern that Python has no words for."""


class Judge:
    """The judge of one schema. Formats that are known must be kept, too."""

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
    """ECMA's pattern in Python's words: classes are ASCII, `$` is the very end, and `.` stops at any line end."""
    if re.search(r"\\s", pattern, re.IGNORECASE):
        raise CannotJudge(pattern)  # ECMA's white space is neither Python's nor ASCII's
    words = {"$": r"\Z", ".": r"[^\n\r\u2028\u2029]"}
    outside = r"(\\.|\[(?:\\.|[^\]\\])*\])|[$.]"  # escapes and bracketed classes stay as they are
    translated = f"(?a:{re.sub(outside, lambda found: found[1] or words[found[0]], pattern)})"
    try:
        re.compile(translated)
    except re.error as error:
        raise CannotJudge(pattern) from error
    return translated
