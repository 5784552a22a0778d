"""Sending one request and naming what went wrong: the generator's HTTP client. Called by player and probe."""

import asyncio
import json
import socket
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cumulo.errors import CumuloError
from cumulo.load import prompts
from cumulo.load.answer import ErrorInStream, MalformedStream, MeasuredAnswer
from cumulo.load.connection import NoHttp, Pool, Response, UpstreamError
from cumulo.load.prompts import Ruler

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

    def body(self, messages: list[dict[str, str]], output_tokens: int) -> bytes:
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
        fields = {name: value for name, value in (fields | self.extra).items() if value is not None}
        return json.dumps(fields).encode()


class RequestFailed(Exception):
    """How a request failed: `kind` is for counting, the message for reading."""

    def __init__(self, kind: str, detail: str, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.status = status
        self.retry_after_s = retry_after_s


def http_request(pool: Pool, method: str, path: str, api_key: str = "", body: bytes = b"") -> bytes:
    headers = [(b"User-Agent", b"cumulo-bench")]
    if body:
        headers.append((b"Content-Type", b"application/json"))
    if api_key:
        headers.append((b"Authorization", f"Bearer {api_key}".encode()))
    return b"".join(pool.request(method, path, headers, body))


async def send(pool: Pool, request: bytes, answer: MeasuredAnswer, timeout_s: float) -> Response:
    """Send and collect into `answer`; raises RequestFailed with everything that can go wrong."""
    try:
        async with asyncio.timeout(timeout_s):
            response = await pool.exchange(request, answer.receive)
    except TimeoutError as error:
        raise RequestFailed("timeout", f"no complete answer within {timeout_s:g} s") from error
    except UpstreamError as error:
        raise _unanswered(pool, error, len(answer.chunk_times_s)) from error
    except MalformedStream as error:
        raise RequestFailed("malformed answer", str(error)) from error
    except ErrorInStream as error:
        raise RequestFailed("error in stream", str(error)) from error
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


def _unanswered(pool: Pool, error: UpstreamError, chunks: int) -> RequestFailed:
    if isinstance(error.__cause__, ConnectionRefusedError):
        return RequestFailed("connection refused", f"nobody listens at {pool.url}")
    if isinstance(error.__cause__, socket.gaierror):
        return RequestFailed("unknown host", f"{pool.host}: {error.__cause__.strerror}")
    if isinstance(error, NoHttp):
        return RequestFailed("malformed answer", str(error))
    if error.status:
        return RequestFailed("stream cut", f"after {chunks} chunks: {error}")
    if error.sent:
        return RequestFailed("connection lost", f"before any answer: {error}")
    return RequestFailed("connection failed", f"{pool.url}: {error}")


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


SHORT_WORDS, LONG_WORDS = 16, 80
_DIALECTS = (
    Dialect(),
    Dialect(ignore_eos=False),
    Dialect("max_completion_tokens", ignore_eos=False),
    Dialect(ignore_eos=False, usage=False),
)


async def discover_model(pool: Pool, api_key: str, timeout_s: float = 30.0) -> str:
    """The first model the server lists."""
    try:
        exchange = await pool.begin([http_request(pool, "GET", "/v1/models", api_key)])
        content = await exchange.whole(timeout_s)
    except UpstreamError as error:
        raise CumuloError(
            f"no server answers at {pool.url}: {error}; start one, or give its address"
        ) from error
    if exchange.response.status != 200:
        raise CumuloError(
            f"{pool.url}/v1/models answers {exchange.response.status}: {error_text(content)}; "
            "check the address and --api-key, or name the model with --model"
        )
    try:
        return str(json.loads(content)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise CumuloError(f"{pool.url}/v1/models lists no model; name one with --model") from error


async def probe(pool: Pool, target: Target, timeout_s: float, tell_seed: str) -> tuple[Target, Ruler]:
    """The target in the dialect the server takes, and a ruler measured with two short prompts."""
    refusals: list[RequestFailed] = []
    try:
        for dialect in _DIALECTS:
            target = replace(target, dialect=dialect)
            try:
                short = await _ask(pool, target, SHORT_WORDS, timeout_s, tell_seed)
                break
            except RequestFailed as error:
                if error.status not in (400, 422):
                    raise
                refusals.append(error)
        else:
            raise refusals[0]  # it says most: later ones asked for less
        if short.prompt_tokens is None:
            return target, Ruler()
        long = await _ask(pool, target, LONG_WORDS, timeout_s, tell_seed)
    except RequestFailed as error:
        raise CumuloError(_explain(pool, target, error)) from error
    if long.prompt_tokens is None:
        return target, Ruler()
    return target, Ruler.fit((SHORT_WORDS, short.prompt_tokens), (LONG_WORDS, long.prompt_tokens))


async def _ask(pool: Pool, target: Target, words: int, timeout_s: float, seed: str) -> MeasuredAnswer:
    answer = MeasuredAnswer()
    body = target.body([{"role": "user", "content": prompts.text(f"{seed}/probe/{words}", words)}], 2)
    request = http_request(pool, "POST", PATHS[target.endpoint], target.api_key, body)
    try:
        await send(pool, request, answer, timeout_s)
    except RequestFailed as error:
        if error.kind != "empty answer":  # two tokens may well hold no text
            raise
    return answer


def _explain(pool: Pool, target: Target, error: RequestFailed) -> str:
    advice = {
        "connection refused": "start the server or give its address",
        "unknown host": "check the address",
        "HTTP 401": "give the key with --api-key",
        "HTTP 403": "give another key with --api-key",
        "HTTP 404": f"check the address, --model ({target.model}) and --endpoint ({target.endpoint})",
        "timeout": "raise --timeout, or see whether the server is alive",
    }.get(error.kind, "the server must accept one request before load makes sense")
    return f"a first request to {pool.url}{PATHS[target.endpoint]} failed ({error.kind}): {error}; {advice}"
