"""Text as it is generated: `IncrementalDetokenizer` turns tokens into text that never ends inside a
character, `StopStringMatcher` cuts the text at a stop string. One of each per streaming sequence.

Both do constant work per token, and both give, piece by piece, exactly what they would give for the whole.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from cumulo.errors import InvalidRequest


class TokenSpelling(Protocol):
    """What of a `Tokenizer` is needed here."""

    space_prefix: bool
    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """`push` each token, then `finish`: joined, the texts are `tokenizer.decode` of all tokens.

    The bytes of an unfinished character wait for their rest; bytes that can never become one turn into
    U+FFFD as soon as that is certain.
    """

    def __init__(self, tokenizer: TokenSpelling, skip_special: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.space_prefix and not continues

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; often all of it, sometimes none."""
        if token_id in self._skipped:
            return ""
        added = self._tokenizer.token_bytes(token_id)
        if self._drop_space and added:
            self._drop_space = False
            if added.startswith(b" "):
                added = added[1:]
        return self._utf8.decode(added)

    def finish(self) -> str:
        """What was held back: the beginning of a character that never ended."""
        return self._utf8.decode(b"", final=True)


class StopStringMatcher:
    """Finds the stop string that ends first in a text given in pieces (of those that end together, the
    longest), however the text is cut.

    Only text that may still become a stop string is held back. An automaton over all stop strings (Aho and
    Corasick 1975) makes that exact and independent of their number: its state is the longest end of the
    text that begins some stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise InvalidRequest("a stop string must not be empty: it would end every answer at once")
        self.include_stop = include_stop
        self.matched: str | None = None
        self._state = 0
        self._held = ""  # always the `depth[state]` last characters of the text
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._ending: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._ending.append(None)
            state = following
        self._ending[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first: from a state to the next shorter end that begins a stop string."""
        self._shorter = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._shorter[following] = self._step(self._shorter[state], character)
                queue.append(following)
            if self._ending[state] is None:
                self._ending[state] = self._ending[self._shorter[state]]

    def _step(self, state: int, character: str) -> int:
        while (following := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._shorter[state]
        return following

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string if one is complete; then all is over."""
        if self.matched is not None:
            return "", self.matched
        if len(self._next) == 1:
            return text, None
        state = self._state
        for index, character in enumerate(text):
            state = self._step(state, character)
            stop = self._ending[state]
            if stop is not None:
                self.matched = stop
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen if self.include_stop else seen[: -len(stop)], stop
        self._state = state
        seen = self._held + text
        certain = len(seen) - self._depth[state]
        self._held = seen[certain:]
        return seen[:certain], None

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held
