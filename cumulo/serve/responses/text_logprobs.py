"""TextLogprobs: which tokens' log-probabilities belong to an answer's text, and which to its thoughts and calls.

The engine reports tokens, the reader gives texts without markers. Used by `items` where the request includes them.
"""

from collections.abc import Iterable
from typing import Any

from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.serve.model_text import ModelText
from cumulo.serve.openai.logprobs import chat_logprobs

Entry = dict[str, Any]


class TextLogprobs:
    def __init__(self, text: ModelText, top: int) -> None:
        self._text, self._top = text, top
        self._pending: list[Entry] = []  # of tokens whose text the reader has not given yet

    def push(self, entries: Iterable[TokenLogprobs]) -> None:
        self._pending += chat_logprobs(self._text, entries, self._top)["content"]

    def entries_for(self, text: str) -> list[Entry]:
        """The entries of the tokens that make this next text. Those of markers before it are dropped."""
        joined = "".join(entry["token"] for entry in self._pending)
        begins = joined.find(text)
        if begins < 0:  # a character cut in two tokens is spelled as two unknown ones
            taken, self._pending = self._pending, []
            return taken
        position = first = last = 0
        for entry in self._pending:
            if position >= begins + len(text):
                break
            position += len(entry["token"])
            last += 1
            first += position <= begins
        taken, self._pending = self._pending[first:last], self._pending[last:]
        return taken
