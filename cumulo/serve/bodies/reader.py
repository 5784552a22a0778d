"""BodyReader: the one place where JSON bodies of requests are received, counted, parsed and validated.

Routes of the class JsonRoute ask it for their body. A small body is read where it arrives, in microseconds. A
large one (by its bytes, or by how much structure it has) is received only when there is a place for it, and
read in a thread, one at a time, in turn among callers: the event loop goes on, and memory is bounded. Whatever
has too much structure is refused before it is parsed.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from cumulo.serve.bodies.strict import Strict, settle_unknown
from cumulo.serve.bodies.structure import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, Structure, structure_of
from cumulo.serve.errors import ApiError, ClientGone, invalid, problem_error


class _Own:
    """One caller's bodies: `places` bounds those that have a place, `turn` lets one at a time wait for it."""

    def __init__(self, places: int) -> None:
        self.places, self.turn = asyncio.Semaphore(places), asyncio.Lock()


class FairPlaces:
    """A few places for large bodies: `places` in all, and `places_each` for one caller, whose further bodies wait
    behind each other. Free places go to the callers in turn. Who waits longer than `patience_s` gets a 503."""

    def __init__(self, places: int, places_each: int, patience_s: float) -> None:
        self._all, self._each, self._patience_s = asyncio.Semaphore(places), places_each, patience_s
        self._callers: WeakValueDictionary[str, _Own] = WeakValueDictionary()  # while they have a body here

    @contextlib.asynccontextmanager
    async def place(self, caller: str) -> AsyncIterator[None]:
        own = self._callers.setdefault(caller, _Own(self._each))
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._patience_s), own.turn:
                    await held.enter_async_context(own.places)
                    await held.enter_async_context(self._all)
            except TimeoutError:
                raise ApiError(
                    503,
                    "too many large request bodies are being read at the moment: try again soon, with fewer at a "
                    "time",
                    code="too_many_large_bodies",
                    retry_after_s=2,
                ) from None
            yield


LARGE_BYTES = 1 << 16
# More structure than this takes milliseconds to validate, however short it is written.
_SMALL = Structure(containers=512, strings=4_096, values=8_192)
# Large bodies that are received or read at the same time: in all, per caller.
IN_MEMORY, IN_MEMORY_EACH = 64, 16
PATIENCE_S = 10.0  # how long a large body waits for its place
SLACK_S, PACE_BYTES_S = 30.0, 1 << 16  # how slowly it may arrive once it has one


class JsonRoute(APIRoute):
    """A route whose endpoint is called as `endpoint(body, request)`, with a body that the application's
    BodyReader (`app.state.bodies`) has made, once the model that it names is loaded (`app.state.models`). Endpoints
    without a body are FastAPI's as usual."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        endpoint, model = self.endpoint, self.body_field.field_info.annotation

        async def handle(request: Request) -> Response:
            state = request.app.state
            body = await state.bodies.read(request.scope, request.receive, model)
            await state.models.enter(request.scope, body)
            response: Response = await endpoint(body, request)
            return response

        return handle


class BodyReader:
    """`max_context`: tokens the served model's context holds; a prompt may be a list of so many numbers."""

    def __init__(self, max_context: Callable[[], int] = lambda: 0) -> None:
        self._max_context = max_context
        self._in_memory = FairPlaces(IN_MEMORY, IN_MEMORY_EACH, PATIENCE_S)
        self._being_read = FairPlaces(1, 1, PATIENCE_S)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-body")

    async def read(self, scope: Scope, receive: Receive, model: type[Strict]) -> Any:
        """Receive a body and make a `model` of it. Raises ApiError, or ClientGone if the sender leaves
        half-way."""
        pieces: list[bytes] = []
        if await _receive(pieces, receive, LARGE_BYTES):
            return await self._read_received(scope, b"".join(pieces), model)
        async with self._in_memory.place(_caller(scope)):
            await _receive(pieces, receive, None)
            return await self._read_received(scope, b"".join(pieces), model)

    async def _read_received(self, scope: Scope, whole: bytes, model: type[Strict]) -> Any:
        if not whole:
            raise invalid("the request has no body; send a JSON object with Content-Type: application/json")
        if not _is_json(scope):
            raise invalid("the body must be a JSON object, sent with Content-Type: application/json")
        if len(whole) <= LARGE_BYTES and structure_of(whole).excess(_SMALL) is None:
            return _validated(whole, model, json.loads)
        most_values = max(MAX_VALUES, self._max_context() + LARGE_BYTES)
        context = copy_context()  # warnings belong to this request
        async with self._being_read.place(_caller(scope)):
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, context.run, read_large, whole, most_values, model
            )


def read_large(whole: bytes, most_values: int, model: type[Strict]) -> Any:
    most = Structure(MAX_CONTAINERS, MAX_STRINGS, most_values)
    if (problem := structure_of(whole).excess(most)) is not None:
        raise invalid(problem, code="too_many_values")
    # It holds the interpreter a quarter as long as `json`.
    return _validated(whole, model, msgspec.json.decode)


def _validated(whole: bytes, model: type[Strict], parse: Callable[[bytes], Any]) -> Any:
    try:
        data = parse(whole)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise invalid(f"the body is not valid JSON: {error.msg} at position {error.pos}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    try:
        body = model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
    else:
        settle_unknown(body)
        return body
    # Outside of the handler: an error that is chained would keep the whole body alive.
    raise problem_error(problems)


def _is_json(scope: Scope) -> bool:
    """Whether the body is said to be application/json or application/anything+json. Examples of Ollama's API use
    curl without a type, which then says that it is a form; pages of other sites are refused by their Origin."""
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded" and scope["path"].startswith("/api/"):
        return True
    return kind.startswith("application/") and kind.endswith(("/json", "+json"))


def _caller(scope: Scope) -> str:
    """The caller whose body it is: a key's, or where no keys are asked for, an address's."""
    caller = scope.get("state", {}).get("caller")
    if caller is not None and caller.name != "anyone":
        return f"key {caller.name}"
    client = scope.get("client")
    return client[0] if client else ""


async def _receive(pieces: list[bytes], receive: Receive, most_bytes: int | None) -> bool:
    """Add what arrives to `pieces` until the body is complete, or too much; returns whether it is complete."""
    received_bytes = 0
    began_s = time.monotonic()
    while most_bytes is None or received_bytes <= most_bytes:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return True
        received_bytes += len(pieces[-1])
        if most_bytes is None and time.monotonic() - began_s > SLACK_S + received_bytes / PACE_BYTES_S:
            raise ApiError(
                408,
                f"a large body must arrive at {PACE_BYTES_S >> 10} KiB/s or more: others wait for its place",
                code="body_too_slow",
                headers={"Connection": "close"},
            )
    return False
