"""Replaying a recorded trace: CSV or JSON lines with a time and two lengths per request.

Reads the column names of the public traces (Azure LLM inference, BurstGPT, Mooncake) besides our own.
"""

import csv
import gzip
import json
import math
import reprlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from cumulo.errors import CumuloError
from cumulo.load.schedule import PlannedConversation, PlannedTurn, Schedule, count_requests

# Compared without case, blanks and underscores.
_TIME = ("timestamp", "times", "time", "arrivals", "arrival", "arrivedat", "arrivaltime")
_INPUT = ("inputtokens", "inputlength", "prompttokens", "promptlength", "contexttokens", "requesttokens")
_OUTPUT = ("outputtokens", "outputlength", "completiontokens", "generatedtokens", "responsetokens")
_CONVERSATION = ("conversation", "conversationid", "session", "sessionid", "chatid")
_BLOCKS = ("hashids", "blocks")
_MOST_LINES, _LONGEST_LINE = 1 << 25, 1 << 22
_MOST_TOKENS = 1 << 24  # of a prompt or an answer


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request; times are seconds since the first one."""

    time_s: float
    input_tokens: int
    output_tokens: int
    conversation: str | None = None
    blocks: tuple[int, ...] = ()
    prefix: str | None = None  # what prompts with this beginning have in common
    prefix_tokens: int = 0


def read_trace(path: Path, unit_s: float = 1.0) -> list[TraceRow]:
    """All rows in order of time. Numeric times are in units of `unit_s`; dates are understood as they are."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            is_json = file.read(1000).lstrip().startswith(("{", "["))
            file.seek(0)
            whole = _bounded(file, path)
            lines = _json_lines(whole, path) if is_json else _csv_lines(whole)
            rows = [_row(fields, unit_s, f"{path}, line {line}") for line, fields in lines]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise CumuloError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise CumuloError(f"the trace {path} has no rows; one request per line is needed")
    rows.sort(key=lambda row: row.time_s)
    first_s = rows[0].time_s
    return [replace(row, time_s=row.time_s - first_s) for row in rows]


def plan_trace(
    rows: list[TraceRow],
    seed: str,
    speed: float = 1.0,
    limit: int | None = None,
    stop_s: float | None = None,
    warmup: int = 0,
) -> Schedule:
    """The trace as a schedule, `speed` times as fast. Rows of one conversation become its turns."""
    grouped: dict[str, list[TraceRow]] = {}
    for number, row in enumerate(rows[:limit]):
        if stop_s is not None and row.time_s / speed >= stop_s:
            break
        grouped.setdefault(f"#{number}" if row.conversation is None else row.conversation, []).append(row)
    conversations = tuple(
        PlannedConversation(
            number,
            tuple(
                PlannedTurn(row.input_tokens, row.output_tokens, 0.0, row.time_s / speed, row.blocks)
                for row in turns
            ),
            f"{seed}/{number}",
            turns[0].time_s / speed,
            seed,
            measured=number >= warmup,
        )
        for number, turns in enumerate(grouped.values())
    )
    return Schedule(conversations, requests=count_requests(conversations))


def _bounded(file: TextIO, path: Path) -> Iterator[str]:
    """Yields its lines. A compressed file of a few megabytes may hold one of gigabytes, or billions of them."""
    for line in range(1, _MOST_LINES + 1):
        text = file.readline(_LONGEST_LINE)
        if not text:
            return
        if len(text) == _LONGEST_LINE:
            raise CumuloError(f"{path}, line {line} has {_LONGEST_LINE:,} characters or more")
        yield text
    raise CumuloError(f"the trace {path} has more than {_MOST_LINES:,} lines: take a part of it")


def _json_lines(file: Iterator[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CumuloError(f"{path}, line {line} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise CumuloError(
                f"{path}, line {line}: each line must be a JSON object, got {text.strip()[:60]}"
            )
        yield line, fields


def _csv_lines(file: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(file)
    for fields in reader:
        yield reader.line_num, fields


def _row(fields: Mapping[str, Any], unit_s: float, where: str) -> TraceRow:
    plain = {"".join(str(name).lower().split()).replace("_", ""): value for name, value in fields.items()}

    def first(names: tuple[str, ...], what: str) -> Any:
        for name in names:
            if plain.get(name) not in (None, ""):
                return plain[name]
        raise CumuloError(f"{where} has no {what}; columns there: {', '.join(map(str, fields))}")

    conversation = next((plain[name] for name in _CONVERSATION if plain.get(name) not in (None, "")), None)
    prefix = plain.get("prefix")
    blocks = next((plain[name] for name in _BLOCKS if isinstance(plain.get(name), list)), ())
    if not all(isinstance(block, int) for block in blocks):
        raise CumuloError(f"{where}: the ids of blocks must be whole numbers")
    return TraceRow(
        _time_s(first(_TIME, "time (timestamp)"), unit_s, where),
        _length(first(_INPUT, "prompt length (input_tokens)"), "prompt", where),
        _length(first(_OUTPUT, "answer length (output_tokens)"), "answer", where),
        None if conversation is None else str(conversation),
        tuple(blocks),
        None if prefix in (None, "") else str(prefix),
        0 if prefix in (None, "") else _length(first(("prefixtokens",), "prefix_tokens"), "prefix", where),
    )


def _time_s(value: Any, unit_s: float, where: str) -> float:
    try:
        if math.isfinite(number := float(value) * unit_s):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError as error:
        raise CumuloError(f"{where}: {value!r} is neither a number of seconds nor a date") from error


def _length(value: Any, what: str, where: str) -> int:
    try:
        length = int(float(value))
    except (TypeError, ValueError, OverflowError):
        length = -1
    if not 0 <= length <= _MOST_TOKENS:
        raise CumuloError(
            f"{where}: the {what}'s length must be a whole number of tokens, at most {_MOST_TOKENS:,}, "
            f"got {reprlib.repr(value)}"
        )
    return max(1, length)  # a recorded failure has no answer; asking for one token is the nearest request
