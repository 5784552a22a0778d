"""Events as they go over the wire."""

import asyncio
import json
from typing import Any

import pytest

from cumulo.serve.api.openai.events import EventStream, EventWriter, event

# What `str.splitlines` takes for a line end. JSON escapes the control characters; the rest must be our care.
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.mark.parametrize("end", LINE_ENDS)
def test_an_event_is_one_line_even_for_clients_that_split_at_unicodes_line_ends(end: str) -> None:
    text = f"é{end}ü"
    line, *rest = event({"id": "a", "text": text}).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"id": "a", "text": text}


def test_a_token_that_cannot_be_worded_ends_its_own_stream_with_an_error() -> None:
    class Asked:
        id, forwarded, complete, closed = "call-1", None, False, False

        async def next_batch(self) -> list[Any]:
            return []

        def close(self) -> None:
            self.closed = True

    class Broken(EventWriter):
        def add(self, batch: list[Any]) -> bytes:
            raise RuntimeError("cannot be worded")

    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    call: Any = Asked()
    asyncio.run(EventStream(call, Broken(), b"first\n", True)({}, None, send))  # type: ignore[arg-type]
    assert sent[1] == b"first\n" and b"the server failed on this request" in sent[2] and call.closed
