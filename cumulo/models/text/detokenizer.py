"""Text as it is generated: `IncrementalDetokenizer` turns tokens into text that never ends inside a
character, `StopStringMatcher` cuts the text at a stop string. One of each per streaming sequence.

Both give, piece by piece, exactly what they would give for the whole.
"""

import codecs
from collections.abc import Sequence

from cumulo.errors import InvalidRequest
from cumulo.models.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """`push` each token, then `finish`: joined, the texts are `tokenizer.decode` of all tokens.

    The bytes of an unfinished character wait for their rest; bytes that can never become one turn into
    U+FFFD as soon as that is certain.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continues: bool = False) -> None:
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
    longest), however the text is cut. Only text that may still become a stop string is held back."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise InvalidRequest("a stop string must not be empty: it would end every answer at once")
        self.include_stop = include_stop
        self.matched: str | None = None
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string if one is complete; then all is over."""
        if self.matched is not None:
            return "", self.matched
        seen = self._held + text
        ends = {stop: seen.find(stop) + len(stop) for stop in self._stops if stop in seen}
        if ends:
            self.matched = stop = min(ends, key=lambda stop: (ends[stop], -len(stop)))
            self._held = ""
            return seen[: ends[stop] if self.include_stop else ends[stop] - len(stop)], stop
        certain = len(seen) - self._begun(seen)
        self._held = seen[certain:]
        return seen[:certain], None

    def _begun(self, text: str) -> int:
        """How many characters at the end of a text begin a stop string, at most."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held
