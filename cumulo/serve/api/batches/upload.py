"""An uploaded file on its way to disk: multipart/form-data read piece by piece. Called by the file endpoints.

No more than one piece is in memory. Parsing and writing happen in a thread, because a body can be made so that the
parser looks at every byte.
"""

import asyncio
import os
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from cumulo.serve.errors import ApiError, ClientGone, invalid

MAX_PARTS = 16
MAX_FIELD_BYTES = 4096


@dataclass(slots=True)
class Upload:
    """What the form said; `size_bytes` of its file have been written."""

    filename: str | None = None
    fields: dict[str, str] = field(default_factory=dict)
    size_bytes: int = 0


async def receive(request: Request, descriptor: int, max_bytes: int, most_words: str) -> Upload:
    """Write the form's `file` to `descriptor`. ApiError if it is longer than `max_bytes`; `most_words` says what
    that limit is."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise invalid(
            "a file is uploaded as multipart/form-data with the fields `purpose` and `file`, not as "
            f"{kind.decode('latin-1')[:64] or 'a body without a Content-Type'!r}"
        )
    form = _Form(descriptor, max_bytes, most_words)
    try:
        parser = MultipartParser(boundary, form.callbacks())  # type: ignore[arg-type]
        async for piece in request.stream():
            if piece:
                await asyncio.to_thread(parser.write, piece)
        await asyncio.to_thread(parser.finalize)
    except FormParserError as error:
        raise invalid(f"the body is not valid multipart/form-data: {error}") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    except OSError as error:
        raise ApiError(
            507, f"the file cannot be stored ({error.strerror}); tell the operator", code="storage_full"
        ) from error
    if not form.ended:
        raise invalid("the body ends before the form does: its last boundary is missing")
    if form.upload.filename is None:
        raise invalid("the form has no `file` with a filename", "file", "missing_required_parameter")
    return form.upload


class _Form:
    """What the parser calls, in a thread, one call at a time."""

    def __init__(self, descriptor: int, max_bytes: int, most_words: str) -> None:
        self.upload, self.ended = Upload(), False
        self._descriptor, self._max_bytes, self._most_words = descriptor, max_bytes, most_words
        self._parts = 0
        self._header_name = self._header_value = self._disposition = b""
        self._name, self._is_file, self._value = "", False, bytearray()

    def callbacks(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in dir(self) if name.startswith("on_")}

    def on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise invalid(f"the form has more than {MAX_PARTS} parts; `purpose` and `file` are two")
        self._disposition, self._value = b"", bytearray()

    # The parser bounds the number and the length of a part's headers.
    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise invalid("a part of the form has no name in its Content-Disposition")
        self._name = options[b"name"].decode("utf-8", "replace")
        self._is_file = self._name == "file" and b"filename" in options
        if self._is_file:
            if self.upload.filename is not None:
                raise invalid("the form has more than one `file`; upload them one by one", "file")
            self.upload.filename = options[b"filename"].decode("utf-8", "replace")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            if len(self._value) + end - start > MAX_FIELD_BYTES:
                raise invalid(
                    f"'{self._name[:64]}' is longer than {MAX_FIELD_BYTES:,} bytes", self._name[:64]
                )
            self._value += data[start:end]
            return
        self.upload.size_bytes += end - start
        if self.upload.size_bytes > self._max_bytes:
            raise ApiError(413, self._most_words, code="file_too_large", headers={"Connection": "close"})
        rest = memoryview(data)[start:end]
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def on_part_end(self) -> None:
        if not self._is_file:
            self.upload.fields[self._name] = bytes(self._value).decode("utf-8", "replace")

    def on_end(self) -> None:
        self.ended = True
