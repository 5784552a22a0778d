"""Drafts of one sequence: what followed the last time it said the same (NgramDraft), or what a draft model or a
head proposed (ProposedDraft).

Prompt lookup (Saxena 2023) with hash chains as in LZ77: the last two tokens lead to where they stood before, newest
first, and the place with the longest common past wins. While the text goes on as it did there, so does the draft.
"""

from array import array
from collections.abc import Sequence as ListLike

from cumulo.engine.decide.speculation.choose import CHANCE_CLASSES, MOST_DRAFTED, class_of, class_of_chance

_TRIED = 8  # earlier places that are compared
_LONGEST = 16  # tokens of common past that are counted


class NgramDraft:
    """The draft of one sequence: `advance` enters every new token, `next_tokens` says what may come next."""

    __slots__ = ("_at", "_earlier", "_last_of", "matched", "size")

    def __init__(self) -> None:
        self._last_of: dict[int, int] = {}  # two tokens -> where the second stood last
        self._earlier = array("i")  # by position: where the same two tokens stood before that, or -1
        self.size = 0  # tokens entered
        self._at = -1  # the token expected next is the one at this position; -1: none is
        self.matched = 0  # tokens before it that agree with the end of the text, as far as they are counted

    def advance(self, tokens: ListLike[int], to: int) -> tuple[int, int]:
        """Enter the tokens up to position `to`; of those that were expected, how many came and how many did not."""
        hits = misses = 0
        last_of, earlier = self._last_of, self._earlier
        for position in range(self.size, to):
            token = tokens[position]
            if self._at >= 0:
                if tokens[self._at] == token:
                    hits += 1
                    self._at += 1
                    self.matched += 1
                else:
                    misses += 1
                    self._at = -1
            before = -1
            if position:
                pair = tokens[position - 1] << 32 | token
                before = last_of.get(pair, -1)
                last_of[pair] = position
            earlier.append(before)
            if self._at < 0 and before >= 0 and position == to - 1:
                self._find(tokens, position)
        self.size = max(self.size, to)
        return hits, misses

    def _find(self, tokens: ListLike[int], position: int) -> None:
        place, best, longest = self._earlier[position], -1, 0
        for _ in range(_TRIED):
            if place < 0:
                break
            length = 2
            while (
                length < _LONGEST and length <= place and tokens[place - length] == tokens[position - length]
            ):
                length += 1
            if length > longest:
                best, longest = place, length
                if length >= _LONGEST:
                    break
            place = self._earlier[place]
        self._at, self.matched = best + 1, longest

    @property
    def kinds(self) -> list[int]:
        """The class of its tokens: one for all."""
        return [class_of(self.matched)]

    @property
    def expects(self) -> bool:
        return self._at >= 0

    @property
    def length(self) -> int:
        """Tokens that can be taken: as many as one likes."""
        return MOST_DRAFTED if self._at >= 0 else 0

    def next_tokens(self, tokens: ListLike[int], count: int) -> list[int]:
        """The next `count` tokens, if the text repeats itself; beyond its own end it repeats what it repeats."""
        if self._at < 0:
            return []
        period = self.size - self._at
        return [tokens[self._at + index % period] for index in range(count)]


class ProposedDraft:
    """The draft of one sequence; it has the same calls as NgramDraft."""

    __slots__ = ("_tokens", "kinds", "size")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self.kinds: list[int] = [CHANCE_CLASSES - 1]  # of each token: how sure its drafter is, in classes
        self.size = 0  # tokens entered

    def propose(self, tokens: list[int], chances: ListLike[float] | None) -> None:
        """They follow the tokens entered so far."""
        self._tokens = tokens
        self.kinds = (
            [CHANCE_CLASSES - 1] * len(tokens) if chances is None else list(map(class_of_chance, chances))
        )

    def advance(self, tokens: ListLike[int], to: int) -> tuple[int, int]:
        """Enter the tokens up to position `to`; of those that were proposed, how many came and how many did not."""
        hits = 0
        came, proposed = to - self.size, self._tokens
        while hits < min(came, len(proposed)) and tokens[self.size + hits] == proposed[hits]:
            hits += 1
        missed = hits < min(came, len(proposed))
        self.size, self._tokens = to, []
        return hits, int(missed)

    @property
    def expects(self) -> bool:
        return bool(self._tokens)

    @property
    def length(self) -> int:
        return len(self._tokens)

    def next_tokens(self, tokens: ListLike[int], count: int) -> list[int]:
        return self._tokens[:count]
