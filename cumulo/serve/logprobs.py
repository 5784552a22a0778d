"""Log-probabilities in the two shapes OpenAI's API has: a list of objects for chats, columns for completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from cumulo.engine.plan import TokenLogprobs
from cumulo.serve.model_text import ModelText

_LOWEST = -9999.0  # what OpenAI's API says of impossible tokens; JSON has no minus infinity


def spoken(
    entries: Sequence[TokenLogprobs], finish_reason: str | None, stop_ids: frozenset[int]
) -> Sequence[TokenLogprobs]:
    """Without the token that ended the answer: it is not part of the text."""
    if finish_reason == "stop" and entries and entries[-1].token in stop_ids:
        return entries[:-1]
    return entries


def chat_logprobs(text: ModelText, entries: Iterable[TokenLogprobs], top: int) -> dict[str, Any]:
    return {
        "content": [
            {
                **_spelled(text, entry.token, entry.logprob),
                "top_logprobs": [_spelled(text, token, logprob) for token, logprob in entry.top[:top]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _spelled(text: ModelText, token: int, logprob: float) -> dict[str, Any]:
    spelling, spelled_bytes = text.token_text(token)
    return {"token": spelling, "logprob": max(logprob, _LOWEST), "bytes": spelled_bytes}


class CompletionColumns:
    """Tokens, their log-probabilities and their offsets in the text, growing as an answer does."""

    def __init__(self, text: ModelText, top: int) -> None:
        self._text, self._top = text, top
        self._offset = 0

    def add(self, entries: Iterable[TokenLogprobs], first_token: int | None = None) -> dict[str, Any]:
        """The columns of these entries; `first_token` has no log-probability: nothing stands before it."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []

        def append(token: int, logprob: float | None, top: dict[str, float] | None) -> None:
            spelling = self._text.token_text(token)[0]
            tokens.append(spelling)
            logprobs.append(logprob)
            tops.append(top)
            offsets.append(self._offset)
            self._offset += len(spelling)

        if first_token is not None:
            append(first_token, None, None)
        for entry in entries:
            top: dict[str, float] = {}
            for token, logprob in entry.top[: self._top]:
                top.setdefault(self._text.token_text(token)[0], max(logprob, _LOWEST))
            append(entry.token, max(entry.logprob, _LOWEST), top)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
