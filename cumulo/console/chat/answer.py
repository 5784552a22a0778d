"""Answer: one answer of the model as plain data, collected from the API's events. Made by RunningAnswers.

It has three forms: a message for the API, an entry for the browser's storage, and what the chat page draws.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cumulo.serve.observe.stories import Record


@dataclass(slots=True)
class ShownToolCall:
    id: str = ""
    name: str = ""
    arguments: str = ""

    def add_piece(self, piece: dict[str, Any]) -> None:
        self.id += piece.get("id") or ""
        function = piece.get("function") or {}
        self.name += function.get("name") or ""
        self.arguments += function.get("arguments") or ""

    @property
    def whole(self) -> bool:
        """Whether its arguments can be sent back; an answer that was cut may end in the middle of them."""
        try:
            return isinstance(json.loads(self.arguments or "{}"), dict)
        except ValueError:
            return False

    def message_part(self) -> dict[str, Any]:
        """The call as an assistant message of the API holds it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments or "{}"},
        }


Odds = list[Any]  # the text of a token (or of the few that spell one character), its probability, words on it


_ABOUT = (
    "request_id", "model", "output_tokens", "finish_reason", "problem", "ttft_s", "decode_s",
    "limited_by", "earlier_tokens",
)  # fmt: skip


@dataclass(slots=True)
class ChatAnswer:
    text: str = ""
    request_id: str = ""
    model: str = ""  # or adapter that was asked
    output_tokens: int = 0
    finish_reason: str | None = None
    problem: str | None = None  # why it ended early, in words for the person who asked
    ttft_s: float | None = None  # time to first token
    decode_s: float | None = None  # from the first token to the last
    limited_by: str = ""  # what ended it, in words, where that was a limit
    earlier_tokens: int = 0  # that it had before it was continued
    calls: dict[int, ShownToolCall] = field(default_factory=dict)
    odds: list[Odds] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)
    _unspelled: list[dict[str, Any]] = field(default_factory=list)  # tokens that spell no whole character yet

    def add_event(self, event: dict[str, Any]) -> None:
        """One event of /v1/chat/completions."""
        self.request_id, self.model = event.get("id", self.request_id), event.get("model", self.model)
        now_s = time.monotonic() - self._began_s
        for choice in event["choices"]:
            delta = choice["delta"]
            piece = delta.get("content") or ""
            if piece or delta.get("tool_calls"):
                self.output_tokens += 1
                if self.ttft_s is None:
                    self.ttft_s = now_s
                self.decode_s = now_s - self.ttft_s
            self.text += piece
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            for call in delta.get("tool_calls") or ():
                self.calls.setdefault(call["index"], ShownToolCall()).add_piece(call)
            if choice.get("logprobs"):
                self._take_odds(choice["logprobs"]["content"])
        if event.get("usage"):
            self.output_tokens = event["usage"]["completion_tokens"]

    def _take_odds(self, tokens: list[dict[str, Any]]) -> None:
        """Tokens in groups that spell whole characters: some characters take several tokens."""
        for entry in tokens:
            self._unspelled.append(entry)
            spelled = _spelling(self._unspelled)
            if spelled is None and len(self._unspelled) < 4:  # no character has more bytes than that
                continue
            group, self._unspelled = self._unspelled, []
            text = spelled if spelled is not None else "".join(one["token"] for one in group)
            share = min(math.exp(one["logprob"]) for one in group)
            self.odds.append([text, round(share, 4), "\n\n".join(map(_told, group))])

    def take_times(self, records: Sequence[Record]) -> None:
        """Take the times of the request's story where there is one: the page itself hears of tokens a little
        later."""
        story = records[0].story if len(records) == 1 else None
        if story is None or story.first_token_s is None or story.finished_s is None:
            return
        self.ttft_s, self.decode_s = records[0].ttft_s, story.finished_s - story.first_token_s
        self.limited_by = story.length_words if self.finish_reason == "length" else ""

    @property
    def said_nothing(self) -> bool:
        return not self.output_tokens and not self.calls

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first one."""
        if self.output_tokens < 2 or not self.decode_s:
            return None
        return (self.output_tokens - 1) / self.decode_s

    def entry(self) -> dict[str, Any]:
        """The answer as a conversation keeps it. Calls that were cut cannot be said again, so they are left out."""
        about = {name: getattr(self, name) for name in _ABOUT}
        entry: dict[str, Any] = {"role": "assistant", "content": self.text, "about": about}
        calls = [call.message_part() for call in self.calls.values() if call.whole]
        if calls:
            entry["tool_calls"] = calls
        if self.odds:
            entry["odds"] = list(self.odds)
        return entry

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> "ChatAnswer":
        known = {name: value for name, value in entry.get("about", {}).items() if name in _ABOUT and value}
        answer = cls(text=str(entry.get("content") or ""), odds=list(entry.get("odds", ())), **known)
        for index, call in enumerate(entry.get("tool_calls", ())):
            function = call["function"]
            answer.calls[index] = ShownToolCall(call["id"], function["name"], function["arguments"])
        return answer

    def continued(self) -> "ChatAnswer":
        """The answer to go on with: its text, and the number of tokens so far; times are those of what comes."""
        tokens = self.earlier_tokens + self.output_tokens
        return ChatAnswer(text=self.text, model=self.model, odds=list(self.odds), earlier_tokens=tokens)


def _spelling(group: list[dict[str, Any]]) -> str | None:
    try:
        return b"".join(bytes(entry["bytes"]) for entry in group).decode()
    except UnicodeDecodeError:
        return None


def _told(entry: dict[str, Any]) -> str:
    others = "\n".join(f"{math.exp(o['logprob']):6.1%}  {o['token']!r}" for o in entry["top_logprobs"])
    return f"probability {math.exp(entry['logprob']):.1%} (log-probability {entry['logprob']:.2f})\n{others}"
