"""How answers are sent: as JSON with their token counts, or as an EventStream of server-sent events.

What was made while the connection had no room is sent in one write. An error after the first byte is an event of
its own, as OpenAI's client expects it; before the first byte it is an ordinary error response.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cumulo.engine.outputs import Delta
from cumulo.serve.api.openai.sampling import is_search
from cumulo.serve.api.openai.schemas import ChatRequest, CompletionRequest
from cumulo.serve.call import Batch, Call
from cumulo.serve.engine_link.messages import Finished
from cumulo.serve.errors import ApiError, ClientGone, invalid
from cumulo.serve.fleet.forwarded import ForwardedRequest

log = logging.getLogger(__name__)

to_json = msgspec.json.Encoder().encode
# Unicode's own line ends. The standard for events does not know them, but clients that read text line by line do
# (`str.splitlines`, httpx's `iter_lines`), and would cut an event in two.
_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")
DONE = b"data: [DONE]\n\n"


class EventWriter(Protocol):
    """Words an answer as events, as it is made. One per streamed call."""

    content_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"

    def add(self, batch: Batch) -> bytes:
        """The events that tell what is new; none where nothing is certain yet."""
        ...

    def end(self) -> bytes:
        """What follows when all is told."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """What is said of a failure in the middle of the stream: OpenAI's words, unless the API has its own."""
        return b"data: " + error.body() + b"\n\n"


def json_response(content: Any, status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")


def page(entries: Sequence[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Up to `limit` of a list's entries, behind the one whose id is `after`."""
    start = 0
    if after is not None:
        ids = [entry["id"] for entry in entries]
        if after not in ids:
            raise invalid(f"there is no {after[:80]!r} in this list to go on after", "after", "invalid_value")
        start = ids.index(after) + 1
    data = entries[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(entries),
    }


def to_line(content: Any) -> bytes:
    """JSON that is one line by anybody's reckoning."""
    line = to_json(content)
    if not line.isascii():
        for end, escaped in _LINE_ENDS:
            line = line.replace(end, escaped)
    return line


def event(content: Any) -> bytes:
    return b"data: " + to_line(content) + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """An event that also has its `type` as its name, as /v1/responses and /v1/messages send them."""
    return b"event: %s\ndata: %s\n\n" % (content["type"].encode(), to_line(content))


class StreamCounts:
    """The token counts that the chunks of a streamed answer have. Without `include_usage` chunks have none; with it
    `usage` is null until the last chunk, and with `continuous_usage_stats` every chunk has the counts so far, as
    vLLM's server sends them."""

    def __init__(self, call: Call, body: ChatRequest | CompletionRequest) -> None:
        options = body.stream_options
        self._call, self._searched = call, is_search(body)
        self.wanted = options is not None and options.include_usage
        self.continuous = options is not None and self.wanted and options.continuous_usage_stats
        self._prompt_tokens = sum(map(len, call.prompts))
        self._output_tokens = 0

    def note(self, item: Delta) -> None:
        self._output_tokens += len(item.token_ids)

    def field(self) -> dict[str, Any]:
        """The `usage` field of a chunk that is sent now."""
        if not self.continuous:
            return {"usage": None} if self.wanted else {}
        return {
            "usage": {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._output_tokens,
                "total_tokens": self._prompt_tokens + self._output_tokens,
            }
        }

    def end(self, base: dict[str, Any], dropped_tokens: int = 0) -> bytes:
        """The end of the stream, with all counts where they are wanted. `base`: the fields that its chunks have in
        common."""
        if not self.wanted:
            return DONE
        counted = usage(self._call.ended, dropped_tokens, self._searched)
        return event({**base, "choices": [], "usage": counted}) + DONE


def usage(results: Iterable[Finished], dropped_tokens: int = 0, searched: bool = False) -> dict[str, Any]:
    """The sum over a call's requests; a prompt counts once however many samples share it. `searched`: by beam
    search, of which the answers count and not the beams that were given up."""
    prompt = output = cached = 0
    for finished in results:
        prompt += finished.story.prompt_tokens
        returned = sum(len(sample.token_ids) for sample in finished.samples)
        output += returned if searched else finished.story.output_tokens
        cached += finished.story.cached_tokens
    output -= dropped_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def open_stream(call: Call, writer: EventWriter) -> Response:
    """Wait for the first event, so that what fails before it has a status of its own."""
    try:
        if call.forwarded is not None and call.forwarded.resumed:
            # What a resumed stream's client has is read again, and not told again.
            writer.add(call.forwarded.read_again(call.service.text.tokenizer, call.params))
        first, more = await _events(call, writer)
    except BaseException:
        call.close()
        raise
    return EventStream(call, writer, first, more)


async def _events(call: Call, writer: EventWriter) -> tuple[bytes, bool]:
    """The next events, and whether more will follow."""
    while True:
        batch = await call.next_batch()
        if call.forwarded is not None:
            batch = _untold(call.forwarded, writer, batch)
            if not batch and not call.complete:
                continue  # nothing to tell: even the beginning of an answer is told with its first token
        events = writer.add(batch)
        if call.complete:
            return events + writer.end() + _end_seal(call), False
        if events:
            return events if call.forwarded is None else events + call.forwarded.seal(), True


def _untold(forwarded: ForwardedRequest, writer: EventWriter, batch: Batch) -> Batch:
    """What the client has not been told: by another server, before this one drew it again. The end of a request
    that this server breaks off is not told either: another one continues it."""
    batch = [pair for pair in batch if not isinstance(pair[1], Delta) or pair[1].finish_reason != "abort"]
    told = [forwarded.is_told(*pair) for pair in batch]
    if any(told):
        writer.add([pair for pair, known in zip(batch, told, strict=True) if known])
        batch = [pair for pair, known in zip(batch, told, strict=True) if not known]
    return batch


def _end_seal(call: Call) -> bytes:
    if call.forwarded is None:
        return b""
    return call.forwarded.end_seal(sum(one.story.cached_tokens for one in call.ended))


class EventStream(Response):
    def __init__(self, call: Call, writer: EventWriter, first: bytes, more: bool) -> None:
        # Instead of Response's own: these headers are always the same.
        self.status_code, self.background, self.body = 200, None, b""
        self.raw_headers = [
            (b"content-type", writer.content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", call.id.encode()),
        ]
        self._call, self._writer, self._first, self._more = call, writer, first, more

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events, more = self._first, self._more
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while more:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                events, more = await self._next()
            await send({"type": "http.response.body", "body": events, "more_body": False})
        except ClientGone:
            pass
        finally:
            self._call.close()

    async def _next(self) -> tuple[bytes, bool]:
        try:
            return await _events(self._call, self._writer)
        except ClientGone:
            raise
        except ApiError as error:
            return self._failure(error), False
        except Exception:
            log.exception("the stream of %s failed", self._call.id)
            return self._failure(ApiError(500, "the server failed on this request")), False

    def _failure(self, error: ApiError) -> bytes:
        seal = b"" if self._call.forwarded is None else self._call.forwarded.failure_seal(error.status)
        return self._writer.fail(error) + seal
