"""BatchRun: one batch from its file's check to its result files. Made by Batches, one at a time per key.

A line starts only while nothing waits in the engine, and with the lowest priority: a batch uses what requests that
somebody waits for leave over. Refusals that pass (429, 503) are waited out.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from cumulo.serve.access.keys import CALLER_KEY, Caller
from cumulo.serve.api.batches import lines
from cumulo.serve.api.batches.lines import Results
from cumulo.serve.api.batches.schemas import BatchRecord, LineError, LineErrors, Status
from cumulo.serve.api.batches.store import FileStore, new_id
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
        self._size_bytes = 0  # of the results
        self._claim: Callable[[int], None]
        self._full: ApiError | None = None  # why there is no room for further results

    def stop(self) -> None:
        self._stop.set()

    @property
    def _caller(self) -> Caller | None:
        """Whose requests these are, with the limits that the key has now; None: it is no longer valid."""
        return self.record.let_in or self._service.caller_named(self.record.owner)

    async def run(self) -> None:
        """Until it has ended. Cancelled when the server ends: then it is resumed by the next one."""
        record, store = self.record, self._store
        # Named before they are made: a server that is killed finds them by these ids.
        record.output_file_id = record.output_file_id or new_id()
        record.error_file_id = record.error_file_id or new_id()
        if record.status == "validating":
            await self._validate()
        if record.ended:
            return
        paths = store.path(record.output_file_id), store.path(record.error_file_id)
        results = await asyncio.to_thread(Results, *paths)
        self._note(results)
        with store.claiming(record.owner) as self._claim:
            try:
                if record.status == "in_progress":
                    self._size_bytes = results.size_bytes
                    await self._work(results)
            finally:
                await asyncio.to_thread(results.close)
            if self._full is not None:
                problem = LineError(self._full.code or "", f"the batch was stopped: {self._full.message}")
                await self._fail([problem])
            elif record.status == "cancelling":
                await self._finalize("cancelled")
            else:
                await self._change(record, "finalizing")
                await self._finalize("completed")

    # -- is it a batch? -----------------------------------------------------------------------------------
    async def _validate(self) -> None:
        record = self.record
        total, errors = await asyncio.to_thread(
            lines.check, self._input_path, record.endpoint, self._max_line_bytes
        )
        if record.status != "validating":  # cancelled meanwhile
            return
        record.request_counts.total = total
        if errors:
            await self._fail(errors)
        else:
            await self._change(record, "in_progress")

    # -- its requests -------------------------------------------------------------------------------------
    async def _work(self, results: Results) -> None:
        unread = lines.read(self._input_path, self._max_line_bytes)
        places = asyncio.Semaphore(LINES_AT_A_TIME)
        async with asyncio.TaskGroup() as running:  # those that are stopped end by themselves, within a step
            while some := await asyncio.to_thread(_some, unread):
                for line in some:
                    if line.custom_id in results.done:
                        continue
                    await places.acquire()
                    await self._turn()
                    if self._stop.is_set():
                        return
                    asked = running.create_task(self._line(line, results))
                    asked.add_done_callback(lambda _: places.release())

    async def _turn(self) -> None:
        """Wait until the engine has nothing to do first, and the key is valid."""
        service = self._service
        while not self._stop.is_set() and (
            not service.takes_requests or service.engine.waiting or service.draining or self._caller is None
        ):
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _line(self, line: lines.Line, results: Results) -> None:
        failures = 0
        while not self._stop.is_set():
            if (caller := self._caller) is None:
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
        content = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": line.custom_id,
            "response": {
                "status_code": answer.status,
                "request_id": answer.headers.get("x-request-id"),
                "body": msgspec.Raw(answer.body),
            },
            "error": None,
        }
        written = msgspec.json.encode(content) + b"\n"
        try:
            self._claim(self._size_bytes + len(written))
        except ApiError as error:
            self._full = error
            self.stop()
            return
        self._size_bytes += len(written)
        await asyncio.to_thread(results.write, line.custom_id, written, good)
        self._note(results)
        self._service.metrics.series("batch_requests", "completed" if good else "failed").inc()

    def _note(self, results: Results) -> None:
        counts = self.record.request_counts
        counts.completed, counts.failed = results.counts[True], results.counts[False]

    # -- its end ------------------------------------------------------------------------------------------
    async def _finalize(self, end: Status) -> None:
        """The files that have lines become files like others."""
        record, store = self.record, self._store
        counts = record.request_counts
        for kind, lines_written in (("output", counts.completed), ("error", counts.failed)):
            field = f"{kind}_file_id"
            if lines_written:
                name = f"{record.id}_{kind}.jsonl"
                await asyncio.to_thread(store.add, getattr(record, field), record.owner, name, "batch_output")
            else:
                setattr(record, field, None)
        await self._change(record, end)
        log.info(
            "batch %s %s: %d of %d requests answered, %d failed",
            record.id, end, counts.completed, counts.total, counts.failed,
        )  # fmt: skip

    async def fail(self, error: Exception) -> None:
        """Something of ours went wrong; the client is told, the log has the rest."""
        log.error("batch %s failed", self.record.id, exc_info=error)
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        reason = error.strerror if isinstance(error, OSError) else "the server failed; its log says more"
        with contextlib.suppress(OSError):
            await self._fail([LineError("server_error", f"the batch was given up: {reason}")])

    async def _fail(self, errors: list[LineError]) -> None:
        self.record.errors = LineErrors(errors)
        await self._finalize("failed")


def _some(unread: Iterator[lines.Line]) -> list[lines.Line]:
    return list(islice(unread, _LINES_PER_READ))


def _code(body: bytes) -> str | None:
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        code: str | None = msgspec.json.decode(body)["error"]["code"]
        return code
    return None
