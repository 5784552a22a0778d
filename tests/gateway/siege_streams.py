"""The streams of a siege: what is asked, and what a client was told, so that two answers can be compared. Played by
tests.gateway.faults."""

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

from cumulo.load.answer import EventReader
from cumulo.load.connection import Pool, Response, UpstreamError
from tests.serve.tiny_model import NAME

ADAPTER = "poet"
_TOKENS = 120
DIFFERENT = 320  # requests; after them they repeat
_LOGPROB = 1e-4
_ASIDE = " Think of the sea, of bread and of rain first."  # repeated, a prompt that is worth handing over
_SCHEMA = {"type": "array", "items": {"enum": ["word", "other"]}, "minItems": 20}
_TOOL = {"type": "function", "function": {"name": "note", "parameters": {
    "type": "object", "properties": {"words": _SCHEMA}, "required": ["words"]}}}  # fmt: skip
KINDS = (
    "greedy", "sampled", "log-probabilities", "tools", "guided", "completion", "two greedy", "responses",
    "stop strings", "alternatives", "three samples", "messages", "penalties", "echoed", "embeddings",
    "responses with a tool", "not streamed",
)  # fmt: skip


def asked(number: int, asides: int = 0, kinds: tuple[str, ...] = KINDS[:8], model: str = NAME) -> Any:
    """The request of a stream, as its path and body: of several kinds, with prompts and seeds of their own."""
    number %= DIFFERENT
    ask = f"Say something long about number {number % 40}." + _ASIDE * asides
    messages = [{"role": "user", "content": ask}]
    whole: dict[str, Any] = {"model": model, "stream": True, "max_tokens": _TOKENS}
    chat, text = whole | {"messages": messages}, whole | {"prompt": ask, "ignore_eos": True}
    on, seeded = {"ignore_eos": True}, {"temperature": 0.9, "seed": number}
    chats: dict[str, dict[str, Any]] = {
        "greedy": on | {"temperature": 0},
        "sampled": on | {"temperature": 1.1, "seed": number},
        "log-probabilities": on | {"temperature": 0, "logprobs": True},
        "tools": {"temperature": 0.7, "seed": number, "max_tokens": 300, "tools": [_TOOL],
                  "tool_choice": "required"},
        "guided": {"temperature": 0.7, "seed": number, "max_tokens": 300, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
        # Some are found, in the middle of a token or over several: the stream ends there.
        "stop strings": on | seeded | {"stop": ["e", "th", " 4"][number % 3] * (1 + number % 2)},
        "alternatives": on | seeded | {"logprobs": True, "top_logprobs": 4},
        "three samples": on | seeded | {"n": 3},
        "penalties": on | seeded | {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_p": 0.01},
    }  # fmt: skip
    texts: dict[str, dict[str, Any]] = {
        "completion": seeded,
        "two greedy": {"temperature": 0, "n": 2},
        "echoed": seeded | {"echo": True, "logprobs": 1},
    }
    kind = kinds[number % len(kinds)]
    if kind in chats:
        return "/v1/chat/completions", chat | chats[kind]
    if kind in texts:
        return "/v1/completions", text | texts[kind]
    if kind == "messages":
        return "/v1/messages", chat | {"temperature": 0}
    if kind == "embeddings":
        return "/v1/embeddings", {"model": model, "input": [ask, ask * 3]}
    if kind == "not streamed":
        return "/v1/chat/completions", chat | on | seeded | {"stream": False, "logprobs": True}
    tool = {"tools": [{"type": "function", **_TOOL["function"]}], "tool_choice": "required"}
    return "/v1/responses", {
        "model": model, "input": ask, "stream": True, "temperature": 0, "max_output_tokens": _TOKENS,
        **(tool if kind == "responses with a tool" else {}),
    }  # fmt: skip


@dataclass(slots=True)
class Told:
    """What a client was told: texts by choice, log-probabilities, and the ends."""

    texts: dict[str, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    error: str = ""
    longest_pause_s: float = 0.0
    id: str = ""
    left: bool = False  # the client hung up

    def add(self, event: Any) -> None:
        kind = event.get("type")
        whole = event.get("response") or event.get("message") or event
        self.id = self.id or (whole.get("id") or "" if isinstance(whole, dict) else "")
        if "error" in event or kind in ("error", "response.failed"):
            self.error = json.dumps(event)
        for choice in event.get("choices", ()):
            self._choice(choice)
        for vector in event.get("data", ()):
            self.logprobs += vector["embedding"]
            self.ends.append("vector")
        if kind in ("response.output_text.delta", "response.function_call_arguments.delta"):
            self._text("", event["delta"])
        if kind == "content_block_delta":
            self._text("", event["delta"].get("text", ""))
        if kind in ("response.completed", "response.incomplete", "message_stop"):
            self.ends.append(kind)

    def _choice(self, choice: Any) -> None:
        delta = choice.get("delta") or choice.get("message") or {}
        calls = "".join(one["function"].get("arguments") or "" for one in delta.get("tool_calls") or ())
        self._text(str(choice["index"]), (choice.get("text") or delta.get("content") or "") + calls)
        logprobs = choice.get("logprobs") or {}
        for entry in logprobs.get("content") or ():
            self.logprobs += [entry["logprob"], *(one["logprob"] for one in entry["top_logprobs"])]
        self.logprobs += [one for one in logprobs.get("token_logprobs") or () if one is not None]
        if choice["finish_reason"]:
            self.ends.append(f"{choice['index']} {choice['finish_reason']}")

    def _text(self, choice: str, new: str) -> None:
        self.texts[choice] = self.texts.get(choice, "") + new

    def difference(self, other: "Told") -> str:
        """What differs, in words; empty: nothing. Log-probabilities of another batch may differ in float32. Of a
        stream that its client left, what came must be the beginning of the other."""
        if self.left:
            ours = {choice: other.texts.get(choice, "")[: len(text)] for choice, text in self.texts.items()}
            return replace(self, left=False, ends=[], logprobs=[]).difference(Told(ours))
        if self.texts != other.texts or len(self.logprobs) != len(other.logprobs):
            mine, theirs = json.dumps(self.texts, sort_keys=True), json.dumps(other.texts, sort_keys=True)
            pairs = enumerate(zip(mine, theirs, strict=False))
            at = next((at for at, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
            around = slice(max(0, at - 20), at + 20)
            return f"text {mine[around]!r} instead of {theirs[around]!r} at {at}"
        if sorted(self.ends) != sorted(other.ends):
            return f"ends {self.ends} instead of {other.ends}"
        far = max((abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)), default=0.0)
        return f"a log-probability is off by {far:.2g}" if far > _LOGPROB else ""


async def listen(pool: Pool, path: str, body: Any, patience_s: float | None = None) -> Told:
    """`patience_s`: the client hangs up when the stream has stood still for so long."""
    told, reader, last_s, whole = Told(), EventReader(), 0.0, b""

    def on_body(response: Response, piece: bytes, _: float) -> None:
        nonlocal last_s, whole
        now_s = time.monotonic()
        if last_s:
            told.longest_pause_s = max(told.longest_pause_s, now_s - last_s)
        last_s = now_s
        if response.status != 200:
            told.error += piece.decode("utf-8", "replace")
            return
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            whole += piece
            return
        for event in reader.feed(piece):
            if event != b"[DONE]":
                told.add(json.loads(event))

    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {pool.host_header}\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
    exchange = asyncio.create_task(pool.exchange(request, on_body))
    try:
        while patience_s is not None and not (await asyncio.wait({exchange}, timeout=0.05))[0]:
            if last_s and time.monotonic() - last_s > patience_s:
                exchange.cancel()
                await asyncio.wait({exchange})
                told.left = True
                return told
        await exchange
        if whole:
            told.add(json.loads(whole))
    except UpstreamError as error:
        told.error = f"connection lost: {error}"
    return told
