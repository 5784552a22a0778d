"""Sending one request and naming what went wrong: the generator's HTTP client. Called by player and probe."""

import asyncio
import json
import socket
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cumulo.load.answer import ErrorInStream, MalformedStream, MeasuredAnswer
from cumulo.load.connection import BadResponse, ConnectionLost, Pool
from cumulo.load.http_response import Response

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which of the optional fields a server takes; found out by the probe."""

    length_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    ignore_eos: bool = True  # an extension: answers of exactly the planned length
    usage: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked of whom, apart from the prompt."""

    model: str
    endpoint: Endpoint = "chat"
    api_key: str = ""
    temperature: float = 0.0
    dialect: Dialect = field(default_factory=Dialect)
    extra: dict[str, Any] = field(default_factory=dict)  # merged into every body; null removes a field

    def body(self, messages: list[dict[str, str]], output_tokens: int, seed: int | None = None) -> bytes:
        fields: dict[str, Any] = {"model": self.model, "stream": True, "temperature": self.temperature}
        if self.endpoint == "chat":
            fields["messages"] = messages
        else:
            fields["prompt"] = "\n".join(message["content"] for message in messages)
        fields[self.dialect.length_field] = output_tokens
        if self.dialect.ignore_eos:
            fields["ignore_eos"] = True
        if self.dialect.usage:
            fields["stream_options"] = {"include_usage": True}
        if seed is not None:
            fields["seed"] = seed
        fields = {name: value for name, value in (fields | self.extra).items() if value is not None}
        return json.dumps(fields).encode()

    def with_dialect(self, dialect: Dialect) -> "Target":
        return replace(self, dialect=dialect)


class RequestFailed(Exception):
    """How a request failed: `kind` is for counting, the message for reading."""

    def __init__(self, kind: str, detail: str, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.status = status
        self.retry_after_s = retry_after_s


def http_request(pool: Pool, method: str, path: str, api_key: str = "", body: bytes = b"") -> bytes:
    head = [f"{method} {pool.path}{path} HTTP/1.1", f"Host: {pool.host_header}", "User-Agent: cumulo-bench"]
    if body:
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if api_key:
        head.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*head, "", ""]).encode() + body


async def send(pool: Pool, request: bytes, answer: MeasuredAnswer, timeout_s: float) -> Response:
    """Send and collect into `answer`; raises RequestFailed with everything that can go wrong."""
    try:
        async with asyncio.timeout(timeout_s):
            response = await pool.exchange(request, answer.receive)
    except TimeoutError as error:
        raise RequestFailed("timeout", f"no complete answer within {timeout_s:g} s") from error
    except ConnectionRefusedError as error:
        raise RequestFailed("connection refused", f"nobody listens at {pool.url}") from error
    except ConnectionLost as error:
        if error.response.status:
            raise RequestFailed("stream cut", f"after {len(answer.chunk_times_s)} chunks: {error}") from error
        raise RequestFailed("connection lost", f"before any answer: {error}") from error
    except (MalformedStream, BadResponse) as error:
        raise RequestFailed("malformed answer", str(error)) from error
    except ErrorInStream as error:
        raise RequestFailed("error in stream", str(error)) from error
    except socket.gaierror as error:
        raise RequestFailed("unknown host", f"{pool.host}: {error.strerror}") from error
    except OSError as error:
        raise RequestFailed("connection failed", f"{pool.url}: {error.strerror or error}") from error
    if response.status != 200:
        raise RequestFailed(
            f"HTTP {response.status}",
            error_text(bytes(answer.body)),
            response.status,
            retry_after_s(response),
        )
    try:
        answer.check_end(response)
    except MalformedStream as error:
        kind = "stream cut" if answer.chunk_times_s else "malformed answer"
        raise RequestFailed(kind, str(error)) from error
    if not answer.chunk_times_s:
        raise RequestFailed("empty answer", f"no text; finish reason {answer.finish_reason}")
    return response


def retry_after_s(response: Response) -> float | None:
    """The server's wish in seconds; the form with a date is not used by API servers."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "")))
    except ValueError:
        return None


def error_text(body: bytes) -> str:
    """The message inside OpenAI's error shape, FastAPI's, or the bare text."""
    try:
        shape = json.loads(body)
    except ValueError:
        return body[:300].decode("utf-8", "replace").strip()
    error = shape.get("error", shape.get("detail", shape)) if isinstance(shape, dict) else shape
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
