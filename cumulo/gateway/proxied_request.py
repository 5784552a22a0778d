"""ProxiedRequest: one request on its way through the gateway, to one replica or, when that fails, to others.

Before the first byte of an answer a request is sent again as it is. A stream that has begun is continued by another
server with the same model, after the tokens that the client has; where that is not possible the client gets an
error event that says so.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence

from starlette.types import Receive, Scope, Send

from cumulo.engine.decide.routing import NoReplica
from cumulo.fleet.decide.prompt_text import Peek
from cumulo.fleet.decide.sealed_stream import SealedStream
from cumulo.fleet.remote.replica import ReplicaWork, UpstreamReplica
from cumulo.fleet.remote.replicas import ChosenReplica, PromptHint, Replicas
from cumulo.fleet.wire import (
    ASK_HEADER,
    PROMPT_HEADER,
    PROOF_HEADER,
    RESUME_PATH,
    VIA_HEADER,
    FleetAsk,
    read_told,
)
from cumulo.gateway.stories import ProxiedRecord
from cumulo.load.connection import NoHttp, Response, UpstreamError, UpstreamExchange
from cumulo.serve.errors import ApiError, ClientGone, anthropic_error, speaks_anthropic

_OWN_OF_A_CONNECTION = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect", b"accept-encoding", b"origin",
    )
)  # fmt: skip
_NEVER_SENT = _OWN_OF_A_CONNECTION | {PROOF_HEADER, ASK_HEADER}
_KEYS = frozenset((b"authorization", b"x-api-key"))
_OWN_OF_AN_ANSWER = frozenset(
    (
        "connection",
        "keep-alive",
        "transfer-encoding",
        "content-length",
        "date",
        "server",
        PROMPT_HEADER.decode(),
        PROOF_HEADER.decode(),
    )
)


def request_headers(headers: Iterable[tuple[bytes, bytes]], with_keys: bool) -> list[tuple[bytes, bytes]]:
    """A client's headers for a replica. `with_keys`: its key is for the replica to check."""
    held = _NEVER_SENT if with_keys else _NEVER_SENT | _KEYS
    return [pair for pair in headers if pair[0] not in held]


def response_headers(response: Response) -> list[tuple[bytes, bytes]]:
    """A replica's headers for the client."""
    return [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in response.headers.items()
        if name not in _OWN_OF_AN_ANSWER
    ]


def is_worth_retrying(status: int, body: bytes) -> bool:
    """Whether another replica may answer what this one refuses: it is at fault, or full, or about to end."""
    return status in (500, 502, 503, 504) or (status == 429 and b'"queue_full"' in body)


def failure_event(path: str, message: str) -> bytes:
    """An error in the middle of a stream."""
    if speaks_anthropic(path):
        return b"event: error\ndata: " + anthropic_error(503, message, "") + b"\n\n"
    error = ApiError(503, message, kind="server_error", code="replica_failed")
    if path == "/v1/responses":
        told = {"type": "error", "code": error.code, "message": message, "param": None}
        return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
    return b"data: " + error.body() + b"\n\n"


log = logging.getLogger(__name__)
STORED = ("/v1/files", "/v1/batches")  # kept by one server: a caller's files are all at one
_PROMPT = PROMPT_HEADER.decode()
_AGAIN_S = 0.5  # until replicas that refused or failed are asked again
_MOST_HELD_BYTES = 64 << 20  # of an answer that is not streamed: it is passed on when it is complete


class ProxiedRequest:
    def __init__(
        self,
        fleet: Replicas,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: bytes,
        asked: Peek,
        prompt: PromptHint,
        ask: FleetAsk,
        record: ProxiedRecord,
        pinned: str | None = None,
        upload: tuple[tuple[bytes, bytes], AsyncIterator[bytes]] | None = None,
    ) -> None:
        """`pinned`: the one replica that can answer, because it has stored what is asked about. `upload`: a body
        that is not held, and before it the header that says its length."""
        self._fleet, self._scope, self._receive, self._send = fleet, scope, receive, send
        self._body, self._asked, self._prompt, self._ask = body, asked, prompt, ask
        self.record, self._pinned, self._upload = record, pinned, upload
        with_keys = ask.caller is None  # else the gateway has checked it
        self._headers = [
            *request_headers(scope["headers"], with_keys),
            (VIA_HEADER, fleet.options.id.encode()),
        ]
        self._stream = SealedStream()
        self._like = ""  # the likeness of the replica that has begun the answer
        self._begun = False  # has the client got a byte?
        self._is_file = False  # ... of a file
        self._refusal: tuple[Response, bytes] | None = None  # what a replica answered that others may not
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None
        self._give_up_status = 503
        self._work: ReplicaWork | None = None

    async def run(self) -> None:
        if self._upload is None:
            self._watcher = asyncio.create_task(self._watch_client())
        try:
            await self._until_answered()
        finally:
            if self._watcher is not None:
                self._watcher.cancel()
            if self._work is not None:
                self._work.release()

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._work is not None:
            self._work.exchange.fail("the client hung up")

    async def _pass_upload(self, exchange: UpstreamExchange, pieces: AsyncIterator[bytes]) -> None:
        try:
            await exchange.send(pieces)
        except (ClientGone, ApiError) as error:
            exchange.fail(error)
        else:
            await self._watch_client()

    # -- attempts -----------------------------------------------------------------------------------------
    async def _until_answered(self) -> None:
        options, tried, fruitless = self._fleet.options, set[str](), 0
        deadline_s = time.monotonic() + options.wait_for_replica_s
        reason = ""
        while True:
            try:
                choice = self._choose(frozenset(tried))
            except NoReplica as error:
                left_s = deadline_s - time.monotonic()
                refused = self._refusal is not None and self._refusal[0].status != 503 and not self._begun
                if left_s <= 0 or refused or self._gone or self._fleet.ended:
                    await self._give_up(reason or str(error))
                    return
                # All have been tried, or none takes requests: wait for one, and ask them all again.
                await self._fleet.wait_for_change(min(left_s, _AGAIN_S) if tried else left_s)
                tried.clear()
                continue
            tokens = self._stream.tokens
            try:
                if await self._attempt(choice):
                    choice.replica.breaker.on_success()
                    return
                tried.add(choice.replica.name)
                fruitless += 1
                choice.replica.breaker.on_no_outcome()
            except (ClientGone, ApiError, asyncio.CancelledError):
                choice.replica.breaker.on_no_outcome()
                raise
            except UpstreamError as error:
                if self._gone:
                    choice.replica.breaker.on_no_outcome()
                    raise ClientGone from None
                reason = self._note_failure(choice.replica, str(error))
                self._give_up_status = 502 if isinstance(error, NoHttp) else 503
                tried = (
                    {choice.replica.name} if self._stream.tokens > tokens else tried | {choice.replica.name}
                )
                fruitless = 0 if self._stream.tokens > tokens else fruitless + 1
                if not self._can_go_on(error) or fruitless > options.retries:
                    await self._give_up(reason)
                    return
                deadline_s = time.monotonic() + options.wait_for_replica_s

    def _choose(self, tried: frozenset[str]) -> ChosenReplica:
        choice = self._fleet.choose(self._prompt, tried, self._like, self._pinned)
        self.record.note_choice(choice.route, time.perf_counter())
        return choice

    def _note_failure(self, replica: UpstreamReplica, reason: str) -> str:
        replica.failures += 1
        replica.breaker.on_failure(time.monotonic(), reason)
        self.record.note_failure(replica.name, reason, self._stream.tokens, time.perf_counter())
        log.warning("%s: %s %s after %d tokens", self._ask.id, replica.name, reason, self._stream.tokens)
        return f"{replica.name} {reason}"

    def _can_go_on(self, error: UpstreamError) -> bool:
        if error.sent and self._scope["method"] != "GET" and self._scope["path"].startswith(STORED):
            return False  # it may have been done
        return not self._fleet.ended and (not self._begun or bool(self._like))

    async def _attempt(self, choice: ChosenReplica) -> bool:
        """Whether the client has its whole answer; False: this replica refuses, another may not. Raises
        UpstreamError when the replica fails."""
        replica, upstream, path = choice.replica, choice.replica.upstream, self._scope["path"]
        replica.requests += 1
        self._stream.restart()
        exchange = await upstream.begin(self._request(replica))
        work = self._work = ReplicaWork(replica, exchange, choice.prompt_tokens)
        try:
            if self._gone:
                raise ClientGone
            if self._upload is not None:
                self._watcher = asyncio.create_task(self._pass_upload(exchange, self._upload[1]))
            response = await exchange.head()
            streams = response.headers.get("content-type", "").startswith("text/event-stream")
            work.note_answer(streams)
            self.record.note_answer(replica.name, response.status, response.headers.get("x-request-id", ""))
            is_file = path.startswith(STORED) and path.endswith("/content")
            if response.status == 200 and (streams or is_file):
                await self._relay(work, streams)
                return True
            whole = await self._whole(work)
            self._learn(replica, response)
            if (
                self._pinned is None
                and self._upload is None
                and (is_worth_retrying(response.status, whole) or self._is_elsewhere(response))
            ):
                self._refusal = response, whole
                self.record.note_refusal(replica.name, response.status, time.perf_counter())
                if response.status in (500, 502, 504):
                    raise UpstreamError(f"answered with status {response.status}")
                return False
            if self._begun:
                raise UpstreamError(
                    f"answered with status {response.status} instead of continuing the stream"
                )
            await self._answer(response, whole)
            return True
        finally:
            work.release()
            self._work = None

    def _is_elsewhere(self, response: Response) -> bool:
        """Whether what is asked about may be stored at another replica: this gateway has not seen it made."""
        stored = self._asked.previous_response_id is not None or self._scope["path"].startswith(
            "/v1/responses/"
        )
        return stored and response.status == 404

    def _request(self, replica: UpstreamReplica) -> Sequence[bytes]:
        method, path, headers = (
            self._scope["method"],
            self._scope["raw_path"].decode("latin-1"),
            self._headers,
        )
        if query := self._scope["query_string"]:
            path += "?" + query.decode("latin-1")
        body: bytes | None = self._body
        if self._upload is not None:
            body, headers = None, [*headers, self._upload[0]]
        if replica.is_cumulo and self._stream.tokens:
            body = self._stream.resume_body(self._scope["path"], self._body)
            path = RESUME_PATH
        method = "GET" if method == "HEAD" else method
        headers = [*headers, *replica.signed(method, path, self._ask)]
        return replica.upstream.request(method, path, headers, body)

    def _learn(self, replica: UpstreamReplica, response: Response) -> None:
        """What the replica told of the prompt, when the client has the first byte of its answer."""
        told = response.headers.get(_PROMPT)
        if told is None or not replica.is_cumulo:
            return
        try:
            prompt = read_told(told)
        except ValueError as error:
            raise NoHttp(f"sent a header {_PROMPT} that cannot be read: {error}") from None
        self.record.note_prompt(prompt.tokens, prompt.cached)
        self._fleet.learn(self._prompt.model, self._prompt.text_bytes, prompt.tokens)

    # -- answers ------------------------------------------------------------------------------------------
    async def _relay(self, work: ReplicaWork, streams: bool) -> None:
        """Passes a stream on as it comes; so a file, too, which nobody can continue."""
        exchange, replica, stream, send = work.exchange, work.replica, self._stream, self._send
        sealed = replica.is_cumulo and streams
        if not self._begun:
            headers = response_headers(exchange.response)
            length = exchange.response.headers.get("content-length")
            if length is not None and not streams:
                headers.append((b"content-length", length.encode("latin-1")))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._begun, self._is_file = True, not streams
            self._like = replica.likeness(self._prompt.model) if streams else ""
        learnt = False
        while pieces := await exchange.next_pieces():
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if sealed:
                try:
                    data = stream.feed(data)
                except ValueError as error:
                    raise NoHttp(f"sent a seal that cannot be read: {error}") from None
            if data:
                self.record.note_sent(time.perf_counter())
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if not learnt:
                learnt = True
                self._learn(replica, exchange.response)
            if self._gone:
                raise ClientGone
        if sealed:
            if stream.state == "open":
                raise UpstreamError("ended its answer in the middle")
            if stream.state == "failed":
                await self._fail_over()
        self.record.note_end(stream.tokens if sealed else None, stream.cached_tokens, time.perf_counter())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail_over(self) -> None:
        """The replica ended the answer with an error of its own."""
        stream = self._stream
        if stream.failed_status >= 500:
            raise UpstreamError("failed on this request")
        await self._send({"type": "http.response.body", "body": stream.failure, "more_body": True})

    async def _whole(self, work: ReplicaWork) -> bytes:
        found, size = list[bytes](), 0
        while pieces := await work.exchange.next_pieces():
            found += pieces
            size += sum(map(len, pieces))
            if size > _MOST_HELD_BYTES:
                raise ApiError(
                    502, f"the answer is larger than the {_MOST_HELD_BYTES:,} bytes that are passed on"
                )
        return b"".join(found)

    async def _answer(self, response: Response, body: bytes) -> None:
        headers = [*response_headers(response), (b"content-length", b"%d" % len(body))]
        self._begun = True
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        self.record.note_sent(time.perf_counter())
        self.record.note_end(None, None, time.perf_counter())
        if self._scope["method"] == "HEAD":
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _give_up(self, reason: str) -> None:
        if self._gone:
            raise ClientGone
        self.record.note_error(reason, time.perf_counter())
        if self._is_file:
            return  # which ends the connection: half a file must not look whole
        if self._begun:
            why = "no other replica could continue it"
            if self._fleet.ended:
                why = "it ends now"
            elif not self._like:
                why = "only Cumulo servers that share the gateway's fleet key can continue another's answer"
            message = f"{reason}; {why}: send the request again"
            event = self._stream.failure or failure_event(self._scope["path"], message)
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        elif self._refusal is not None:
            await self._answer(*self._refusal)
        else:
            message = f"no replica could answer: {reason}"
            raise ApiError(self._give_up_status, message, code="no_replica", retry_after_s=2)
