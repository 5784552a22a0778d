"""BodyReader: the one place where JSON bodies of requests are received, counted, parsed and validated.

DirectRoute calls it for every request with a JSON body, whatever its path. A small body is read where it arrives,
in microseconds. A large one (by its bytes, or by how much structure it has) is received only when there is a place
for it, and read in a thread, one at a time, in turn among callers: the event loop goes on, and memory is bounded.
Whatever has too much structure is refused before it is parsed.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.types import Message, Receive, Scope

from cumulo.serve.bodies.places import FairPlaces
from cumulo.serve.bodies.structure import MAX_VALUES, Structure, excess, rough_structure
from cumulo.serve.errors import ApiError, invalid, problem_error

Read = Callable[[bytes], Any]  # raises one of these on a body that is not in good form
_NOT_IN_GOOD_FORM = (ValueError, msgspec.MsgspecError)

LARGE_BYTES = 1 << 16
_TINY_BYTES = 2_048  # has no room for much structure, so it is not counted
# More structure than this takes milliseconds to validate, however short it is written.
_SMALL = Structure(containers=512, strings=4_096, values=8_192)
IN_MEMORY, IN_MEMORY_EACH = (
    64,
    16,
)  # large bodies that are received or read at the same time: in all, per caller
PATIENCE_S = 10.0  # how long a large body waits for its place
SLACK_S, PACE_BYTES_S = 30.0, 1 << 16  # how slowly it may arrive once it has one


# The messages that brought a body, for FastAPI to read it, or else what was made of it.
Body = tuple[list[Message], Any]


class BodyReader:
    """`max_context`: tokens the served model's context holds; a prompt may be a list of so many numbers."""

    def __init__(self, max_context: Callable[[], int] = lambda: 0) -> None:
        self._max_context = max_context
        self._in_memory = FairPlaces(IN_MEMORY, IN_MEMORY_EACH, PATIENCE_S)
        self._being_read = FairPlaces(1, 1, PATIENCE_S)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-body")

    async def read(
        self, scope: Scope, receive: Receive, model: type[BaseModel] | None, quick: Read | None
    ) -> Body:
        """Receive a body and make a `model` of it, or what `quick` makes of it where it can. Without a model, and
        for small bodies with a mistake, the body is counted only. Raises ApiError."""
        first = await receive()
        messages = [first]
        if _is_last(first) or await _receive(messages, receive, LARGE_BYTES - len(first.get("body", b""))):
            return await self._read_received(scope, messages, model, quick)
        async with self._in_memory.place(_caller(scope)):
            await _receive(messages, receive, None)
            return await self._read_received(scope, messages, model, quick)

    async def _read_received(
        self, scope: Scope, messages: list[Message], model: type[BaseModel] | None, quick: Read | None
    ) -> Body:
        if messages[-1]["type"] != "http.request":
            return messages, None  # the sender left half-way: nothing to read
        whole = (
            messages[0].get("body", b"")
            if len(messages) == 1
            else b"".join(message.get("body", b"") for message in messages)
        )
        if len(whole) <= _TINY_BYTES or _is_small(whole):
            try:
                if quick is not None:
                    return [], quick(whole)
            except _NOT_IN_GOOD_FORM:
                pass  # it may still be a model's
            with contextlib.suppress(ValueError):  # FastAPI reads it again, and words what is wrong
                if model is not None:
                    return [], model.model_validate_json(whole)
            return messages, None
        most_values = max(MAX_VALUES, self._max_context() + LARGE_BYTES)
        context = copy_context()  # warnings belong to this request
        async with self._being_read.place(_caller(scope)):
            value = await asyncio.get_running_loop().run_in_executor(
                self._thread, context.run, read_large, whole, most_values, model, quick
            )
        return (messages, None) if model is None else ([], value)


def read_large(whole: bytes, most_values: int, model: type[BaseModel] | None, quick: Read | None) -> Any:
    """A body as its model. Everything about it is told here: parsing it twice, to word an error as FastAPI does,
    would take twice as long."""
    if (problem := excess(whole, most_values)) is not None:
        raise invalid(problem, code="too_many_values")
    if model is None:
        return None
    if quick is not None:
        with contextlib.suppress(*_NOT_IN_GOOD_FORM):
            return quick(whole)
    try:
        data = msgspec.json.decode(whole)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except _NOT_IN_GOOD_FORM as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
    # Outside of the handler: an error that is chained would keep the whole body alive.
    raise problem_error([{**problem, "loc": ("body", *problem["loc"])} for problem in problems])


def _is_small(whole: bytes) -> bool:
    if len(whole) > LARGE_BYTES:
        return False
    found = rough_structure(whole)
    return (
        found.containers <= _SMALL.containers
        and found.strings <= _SMALL.strings
        and found.values <= _SMALL.values
    )


def _caller(scope: Scope) -> str:
    """Whose body it is: a key's, or where no keys are asked for, an address's."""
    caller = scope.get("state", {}).get("caller")
    if caller is not None and caller.name != "anyone":
        return f"key {caller.name}"
    client = scope.get("client")
    return client[0] if client else ""


async def _receive(messages: list[Message], receive: Receive, most_bytes: int | None) -> bool:
    """Add what arrives to `messages` until the body is complete, or more than this; whether it is complete."""
    received_bytes = 0
    began_s = time.monotonic()
    while most_bytes is None or received_bytes <= most_bytes:
        message = await receive()
        messages.append(message)
        if _is_last(message):
            return True
        received_bytes += len(message.get("body", b""))
        if most_bytes is None and time.monotonic() - began_s > SLACK_S + received_bytes / PACE_BYTES_S:
            raise ApiError(
                408,
                f"a large body must arrive at {PACE_BYTES_S >> 10} KiB/s or more: others wait for its place",
                code="body_too_slow",
                headers={"Connection": "close"},
            )
    return False


def _is_last(message: Message) -> bool:
    """Nothing of the body follows: it is complete, or the client has left."""
    return message["type"] != "http.request" or not message.get("more_body", False)
