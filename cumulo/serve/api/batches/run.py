"""BatchRun: one batch from its file's check to its result files. Made by Batches, one at a time per key.

A line starts only while nothing waits in the engine, and with the lowest priority: a batch uses what requests that
somebody waits for leave over. Refusals that pass (429, 503) are waited out.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from cumulo.serve.access.keys import CALLER_KEY, Caller
from cumulo.serve.api.batches import lines
from cumulo.serve.api.batches.lines import Results
from cumulo.serve.api.batches.schemas import BatchRecord, LineError, Status
from cumulo.serve.api.batches.store import FileStore
from cumulo.serve.call import LEAST_PRIORITY_KEY
from cumulo.serve.errors import ApiError
from cumulo.serve.service import Service

BATCH_PRIORITY = 100  # the least important there is


@dataclass(slots=True)
class Answer:
    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


async def ask(app: ASGIApp, path: str, body: bytes, caller: Caller, stop: asyncio.Event) -> Answer:
    """POST `body` to the server's own application, without a socket. It takes the way of any other request; whose
    it is stands in the scope, and it goes after every request that somebody waits for. `stop`: the one who asked
    has gone; the engine is told to end it."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {LEAST_PRIORITY_KEY: BATCH_PRIORITY},
        CALLER_KEY: caller,
    }
    unsent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    answer = Answer()

    async def receive() -> Message:
        if unsent:
            return unsent.pop()
        await stop.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = Headers(raw=list(message["headers"]))
        elif message["type"] == "http.response.body":
            answer.body += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception:
        # Starlette answers 500, then raises for the log of a server around it; ours has been written already.
        if not answer.headers:
            log.exception("a batch's request to %s failed", path)
            answer.body = ApiError(500, "the server failed on this request; its log says more").body()
    return answer


log = logging.getLogger(__name__)

LINES_AT_A_TIME = 16
_LINES_PER_READ = 8
_ENGINE_FAILURES = 3  # a request that an engine died of so many times is given up
_LOOK_AGAIN_S = 0.02
_LONGEST_PAUSE_S = 60.0


class BatchRun:
    def __init__(
        self,
        record: BatchRecord,
        app: ASGIApp,
        service: Service,
        store: FileStore,
        change: Callable[[BatchRecord, Status], Awaitable[None]],
    ) -> None:
        """`change`: notes on disk that the batch has come to a status."""
        self.record = record
        self._app, self._service, self._store, self._change = app, service, store, change
        self._input_path = store.path(record.input_file_id)
        self._max_line_bytes = service.options.max_body_bytes
        self._stop = asyncio.Event()  # set: start nothing more, and end what runs

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Until it has ended. Cancelled when the server ends: then it is resumed by the next one."""
        record = self.record
        expiry = asyncio.get_running_loop().call_later(
            max(0.0, record.expires_at - time.time()), self._expire
        )
        try:
            if record.status == "validating":
                await self._validate()
            results = await asyncio.to_thread(Results, self._store.folder, record.id)
            try:
                if record.output_file_id is None and record.error_file_id is None:  # else they have moved
                    record.completed, record.failed = results.completed, results.failed
                if record.status == "in_progress" and record.becomes is None:
                    await self._work(results)
                if record.becomes == "expired":
                    await asyncio.to_thread(self._write_expired, results)
                    record.completed, record.failed = results.completed, results.failed
            finally:
                await asyncio.to_thread(results.close)
            if not record.ended:
                await self._finalize(results)
        finally:
            expiry.cancel()

    def _expire(self) -> None:
        if self.record.status in ("validating", "in_progress"):
            self.record.becomes = "expired"
            self.stop()

    # -- is it a batch? -----------------------------------------------------------------------------------
    async def _validate(self) -> None:
        record = self.record
        total, errors = await asyncio.to_thread(
            lines.check, self._input_path, record.endpoint, self._max_line_bytes
        )
        if record.status != "validating":  # cancelled meanwhile
            return
        record.total, record.errors = total, errors
        await self._change(record, "failed" if errors else "in_progress")

    # -- its requests -------------------------------------------------------------------------------------
    async def _work(self, results: Results) -> None:
        unread = lines.read(self._input_path, self._max_line_bytes)
        running: set[asyncio.Task[None]] = set()
        try:
            while some := await asyncio.to_thread(_some, unread):
                for line in some:
                    if line.custom_id in results.done:
                        continue
                    while len(running) >= LINES_AT_A_TIME:
                        running -= await _first_done(running)
                    await self._turn()
                    if self._stop.is_set():
                        return
                    running.add(asyncio.create_task(self._line(line, results)))
            while running:
                running -= await _first_done(running)
        finally:
            if not self._stop.is_set():
                for task in running:
                    task.cancel()
            if running:  # those that were stopped end by themselves, within a step
                await asyncio.gather(*running, return_exceptions=True)

    async def _turn(self) -> None:
        """Wait until the engine has nothing to do first, and the key is valid."""
        service = self._service
        while not self._stop.is_set() and (
            service.engine.state != "ready"
            or service.engine.waiting
            or service.draining
            or self._service.caller_named(self.record.owner) is None
        ):
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _line(self, line: lines.Line, results: Results) -> None:
        failures = 0
        while not self._stop.is_set():
            caller = self._service.caller_named(self.record.owner)
            if caller is None:
                await self._pause(1.0)
                continue
            answer = await ask(self._app, self.record.endpoint, line.body, caller, self._stop)
            if self._stop.is_set() and answer.status != 200:
                return
            if answer.status in (429, 503):
                failures += _code(answer.body) == "engine_error" and not self._service.draining
                if failures < _ENGINE_FAILURES:
                    await self._pause(float(answer.headers.get("retry-after", "1")))
                    await self._turn()
                    continue
            await self._write(line, answer, results)
            return

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), min(seconds, _LONGEST_PAUSE_S))

    async def _write(self, line: lines.Line, answer: Answer, results: Results) -> None:
        good = answer.status == 200
        response = {
            "status_code": answer.status,
            "request_id": answer.headers.get("x-request-id"),
            "body": msgspec.Raw(answer.body),
        }
        content = {**_head(line.custom_id), "response": response, "error": None}
        await asyncio.to_thread(results.write, content, good)
        self.record.completed, self.record.failed = results.completed, results.failed
        self._service.metrics.of("batch_requests", "completed" if good else "failed").inc()

    def _write_expired(self, results: Results) -> None:
        """Every request that was not answered in time is told so. Blocks: called in a thread."""
        if not self.record.total:  # never checked
            return
        error = {"code": "batch_expired", "message": "this request was not done within the completion window"}
        for line in lines.read(self._input_path, self._max_line_bytes):
            if line.custom_id not in results.done:
                results.write({**_head(line.custom_id), "response": None, "error": error}, good=False)

    # -- its end ------------------------------------------------------------------------------------------
    async def _finalize(self, results: Results) -> None:
        record, store = self.record, self._store
        end: Status = record.becomes or "completed"
        record.becomes = end
        # Named before they are made: a server that is killed in between finds them by these ids.
        if results.completed and record.output_file_id is None:
            record.output_file_id = _file_id()
        if results.failed and record.error_file_id is None:
            record.error_file_id = _file_id()
        await self._change(record, "cancelling" if end == "cancelled" else "finalizing")
        for file_id, path, word in (
            (record.output_file_id, results.output_path, "output"),
            (record.error_file_id, results.error_path, "errors"),
        ):
            if file_id is not None:
                name = f"{record.id}_{word}.jsonl"
                await asyncio.to_thread(store.add, file_id, path, record.owner, name, "batch_output")
            path.unlink(missing_ok=True)
        await self._change(record, end)
        log.info(
            "batch %s %s: %d of %d requests answered, %d failed",
            record.id, end, record.completed, record.total, record.failed,
        )  # fmt: skip

    async def fail(self, error: Exception) -> None:
        """Something of ours went wrong; the client is told, the log has the rest."""
        log.error("batch %s failed", self.record.id, exc_info=error)
        reason = error.strerror if isinstance(error, OSError) else "the server failed; its log says more"
        self.record.errors = [LineError("server_error", f"the batch was given up: {reason}")]
        with contextlib.suppress(OSError):
            await self._change(self.record, "failed")


def _some(unread: Iterator[lines.Line]) -> list[lines.Line]:
    return list(islice(unread, _LINES_PER_READ))


async def _first_done(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # raises what went wrong
    return done


def _head(custom_id: str) -> dict[str, Any]:
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id}


def _file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def _code(body: bytes) -> str | None:
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        code: str | None = msgspec.json.decode(body)["error"]["code"]
        return code
    return None
