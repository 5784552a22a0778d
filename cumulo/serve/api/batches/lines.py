"""The lines of a batch's files: the input is checked once, then read in order; Results has what was written.
Called by the runner, in a thread.

A line is {"custom_id", "method": "POST", "url": ENDPOINT, "body": {...}}. What is wrong with a body is that
request's own error; here it is only refused that the file is no batch.
"""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from cumulo.serve.api.batches.schemas import LineError
from cumulo.serve.api.batches.store import private_opener

MAX_LINES = 50_000  # as many as OpenAI's API takes
MAX_ERRORS = 100  # told per file
_LONGEST_ID = 512


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Line:
    custom_id: str
    body: bytes  # a JSON object


_decode = msgspec.json.Decoder(_Line).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check(path: Path, endpoint: str, max_line_bytes: int) -> tuple[int, list[LineError]]:
    """How many requests the file has, and what is wrong with it."""
    errors: list[LineError] = []
    lines_by_id: dict[str, int] = {}
    with path.open("rb") as file:
        for number, content in _numbered(file, max_line_bytes):
            found = _problem(content, endpoint, max_line_bytes, lines_by_id, number)
            if found is not None:
                errors.append(found)
            if len(errors) >= MAX_ERRORS:
                break
            if len(lines_by_id) > MAX_LINES:
                errors.append(
                    LineError(
                        "too_many_tasks", f"the file has more than {MAX_LINES:,} requests: split it", number
                    )
                )
                break
    if not lines_by_id and not errors:
        errors.append(LineError("empty_file", "the file has no request in it"))
    return len(lines_by_id), errors


def read(path: Path, max_line_bytes: int) -> Iterator[Line]:
    """The requests of a file that was found to be good."""
    with path.open("rb") as file:
        for _, content in _numbered(file, max_line_bytes):
            line = _decode(content)
            yield Line(line.custom_id, bytes(line.body))


def _numbered(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, from 1. One that is too long comes cut, and is the last."""
    number = 0
    while content := file.readline(max_line_bytes + 1):
        number += 1
        if content.strip():
            yield number, content
        if len(content) > max_line_bytes:
            return


def _problem(
    content: bytes, endpoint: str, max_line_bytes: int, lines_by_id: dict[str, int], number: int
) -> LineError | None:
    if len(content) > max_line_bytes:
        return LineError(
            "line_too_long",
            f"a request may have {max_line_bytes:,} bytes; the lines after it were not read",
            number,
        )
    try:
        line = _decode(content)
        body = _decode_object(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineError(
            "invalid_json_line",
            f'not a request of the form {{"custom_id", "method", "url", "body"}}: {error}',
            number,
        )
    first_line = lines_by_id.setdefault(line.custom_id, number)
    for is_wrong, code, param, message in (
        (
            not 0 < len(line.custom_id) <= _LONGEST_ID,
            "invalid_custom_id", "custom_id", f"custom_id must have 1 to {_LONGEST_ID} characters",
        ),
        (
            first_line != number,
            "duplicate_custom_id", "custom_id", f"custom_id {line.custom_id[:64]!r} is in line {first_line}, too",
        ),
        (line.method != "POST", "invalid_method", "method", f"method must be 'POST', not {line.method[:16]!r}"),
        (
            line.url != endpoint,
            "invalid_url", "url", f"url must be the batch's endpoint {endpoint!r}, not {line.url[:64]!r}",
        ),
        (
            bytes(body.get("stream", b"null")) not in (b"false", b"null"),
            "invalid_request", "body.stream", "a batch has no streams: leave 'stream' out of the body",
        ),
    ):  # fmt: skip
        if is_wrong:
            return LineError(code, message, number, param)
    return None


class _Written(msgspec.Struct):
    custom_id: str


_decode_written = msgspec.json.Decoder(_Written).decode


class Results:
    """The lines a batch has written so far, and by that what it need not do again (`done`), in two files: one of
    good answers, one of errors. A line counts when it is complete, so what a killed server wrote in part is cut off
    and that request runs again. Blocks: made and written in a thread."""

    def __init__(self, output_path: Path, error_path: Path) -> None:
        self._paths = {True: output_path, False: error_path}  # good or not
        self._files: dict[bool, BinaryIO] = {}  # a file is made by its first line
        self._lock = threading.Lock()
        self.done: set[str] = set()
        self.size_bytes = 0
        self.counts = {good: self._recover(path) for good, path in self._paths.items()}

    def _recover(self, path: Path) -> int:
        if not path.exists():
            return 0
        count = good_bytes = 0
        with path.open("rb") as file:
            for content in file:
                if not content.endswith(b"\n"):
                    break
                self.done.add(_decode_written(content).custom_id)
                count += 1
                good_bytes += len(content)
        os.truncate(path, good_bytes)
        self.size_bytes += good_bytes
        return count

    def write(self, custom_id: str, line: bytes, good: bool) -> None:
        with self._lock:
            if good not in self._files:
                self._files[good] = open(self._paths[good], "ab", 0, opener=private_opener)  # noqa: SIM115
            rest = memoryview(line)
            while rest:
                rest = rest[self._files[good].write(rest) :]
            self.done.add(custom_id)
            self.counts[good] += 1

    def close(self) -> None:
        """Everything written is on disk before the record says so."""
        with self._lock:
            for file in self._files.values():
                os.fsync(file.fileno())
                file.close()
