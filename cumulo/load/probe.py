"""Getting to know a server before the load: is it there, which model, which fields, how it counts tokens.

Called once by the campaign; what it cannot settle is a CumuloError the user can act on.
"""

import json

from cumulo.errors import CumuloError
from cumulo.load import prompts
from cumulo.load.answer import MeasuredAnswer
from cumulo.load.client import PATHS, Dialect, RequestFailed, Target, error_text, http_request, send
from cumulo.load.connection import Pool
from cumulo.load.http_response import Response
from cumulo.load.prompts import Ruler

SHORT_WORDS, LONG_WORDS = 16, 80
_DIALECTS = (
    Dialect(),
    Dialect(ignore_eos=False),
    Dialect("max_completion_tokens", ignore_eos=False),
    Dialect(ignore_eos=False, usage=False),
)


async def discover_model(pool: Pool, api_key: str, timeout_s: float = 30.0) -> str:
    """The first model the server lists."""
    collected = bytearray()
    status = 0

    def on_body(response: Response, piece: bytes, now_s: float) -> None:
        collected.extend(piece)

    try:
        import asyncio

        async with asyncio.timeout(timeout_s):
            response = await pool.exchange(http_request(pool, "GET", "/v1/models", api_key), on_body)
        status = response.status
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise CumuloError(
            f"no server answers at {pool.url}: {reason}; start one, or give its address"
        ) from error
    if status != 200:
        raise CumuloError(
            f"{pool.url}/v1/models answers {status}: {error_text(bytes(collected))}; "
            "check the address and --api-key, or name the model with --model"
        )
    try:
        return str(json.loads(collected)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise CumuloError(f"{pool.url}/v1/models lists no model; name one with --model") from error


async def probe(pool: Pool, target: Target, timeout_s: float, tell_seed: str) -> tuple[Target, Ruler]:
    """The target in the dialect the server takes, and a ruler measured with two short prompts."""
    short: MeasuredAnswer | None = None
    refusal: RequestFailed | None = None
    for dialect in _DIALECTS:
        try:
            short = await _ask(pool, target.with_dialect(dialect), SHORT_WORDS, timeout_s, tell_seed)
        except RequestFailed as error:
            if error.status not in (400, 422):
                raise CumuloError(_explain(pool, target, error)) from error
            refusal = refusal or error  # the first says most: later ones ask for less
            continue
        target = target.with_dialect(dialect)
        break
    if short is None:
        assert refusal is not None
        raise CumuloError(_explain(pool, target, refusal)) from refusal
    if short.prompt_tokens is None:
        return target, Ruler()
    try:
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
