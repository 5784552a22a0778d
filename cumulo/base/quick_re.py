r"""The functions of `re` for many patterns that are looked for in long texts and mostly are not there, as in
`cumulo diagnose`.

A pattern is searched for only if the text contains the words without which it cannot match:
`port \d+ is (?:Down|Init)` needs "port ", and " is Down" or " is Init". The words are read from the pattern itself.
Looking for a word takes a small part of the time that a pattern of many alternatives takes, and the results are the
same.
"""

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from re import DOTALL, IGNORECASE, MULTILINE, I, M, Match, S, escape, fullmatch, match, split
from typing import Any

__all__ = [
    "DOTALL", "IGNORECASE", "MULTILINE", "I", "M", "Match", "Pattern", "S",
    "compile", "escape", "findall", "fullmatch", "match", "needed_words", "search", "split", "sub",
]  # fmt: skip
_SHORTEST = 2  # letters of a word that is worth looking for
_MOST_WORDS = 24  # of which one must be there
_MOST_SETS = 3


class Pattern:
    """A compiled pattern, as `re.compile` makes it, less what it is never asked."""

    __slots__ = ("_any_case", "_pattern", "_words", "flags", "fullmatch", "match", "pattern", "split")

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self._pattern = re.compile(pattern, flags)
        self._any_case = bool(self._pattern.flags & I)
        self._words = needed_words(self._pattern)
        self.pattern, self.flags = pattern, self._pattern.flags
        self.match, self.fullmatch = self._pattern.match, self._pattern.fullmatch
        self.split = self._pattern.split

    def _absent(self, text: str) -> bool:
        """Whether a word is missing that every match has."""
        if self._any_case:
            if not text.isascii():  # some of whose letters match others than their small ones
                return False
            text = text.lower()
        for words in self._words:
            for word in words:
                if word in text:
                    break
            else:
                return True
        return False

    def search(self, text: str, *span: int) -> re.Match[str] | None:
        return None if self._absent(text) else self._pattern.search(text, *span)

    def findall(self, text: str, *span: int) -> list[Any]:
        return [] if self._absent(text) else self._pattern.findall(text, *span)

    def finditer(self, text: str, *span: int) -> Iterator[re.Match[str]]:
        return iter(()) if self._absent(text) else self._pattern.finditer(text, *span)

    def sub(self, new: str | Callable[[re.Match[str]], str], text: str) -> str:
        return text if self._absent(text) else self._pattern.sub(new, text)


@functools.cache
def compile(pattern: str, flags: int = 0) -> Pattern:
    return Pattern(pattern, flags)


def search(pattern: str, text: str, flags: int = 0) -> re.Match[str] | None:
    return compile(pattern, flags).search(text)


def findall(pattern: str, text: str, flags: int = 0) -> list[Any]:
    return compile(pattern, flags).findall(text)


def sub(pattern: str, new: str | Callable[[re.Match[str]], str], text: str, flags: int = 0) -> str:
    return compile(pattern, flags).sub(new, text)


# -- which words a pattern needs -------------------------------------------------------------------------------
_Words = frozenset[str]
_Part = tuple[Any, Any]  # its kind, and what it consists of


def needed_words(pattern: re.Pattern[str]) -> tuple[tuple[str, ...], ...]:
    """Sets of words: every match contains at least one word of each set. The words are in lower case where the
    pattern ignores case. There is no set where nothing is certain, or where this Python cannot parse patterns."""
    try:
        parser = importlib.import_module("re._parser")
    except ImportError:
        return ()
    found = _sets(parser.parse(pattern.pattern, pattern.flags), bool(pattern.flags & I))
    best = sorted(found, key=_worth, reverse=True)[:_MOST_SETS]
    return tuple(tuple(sorted(words, key=lambda word: (-len(word), word))) for words in best)


def _worth(words: AbstractSet[str]) -> tuple[int, int]:
    return min(map(len, words)), -len(words)


def _sets(items: Sequence[_Part], any_case: bool) -> list[_Words]:
    """Of a sequence of parts: what each needs. Letters that follow each other are one word."""
    found: list[_Words] = []
    letters: list[_Part] = []
    for kind, value in items:
        name = str(kind)
        if name == "LITERAL" and (not any_case or chr(value).isascii()):
            letters.append((kind, value))
        elif name != "AT" and not name.startswith("ASSERT"):  # which match no letters
            found += _of_part(name, value, letters, any_case) or _word(letters, any_case)
            letters = []
    return found + _word(letters, any_case)


def _word(letters: list[_Part], any_case: bool) -> list[_Words]:
    word = "".join(chr(code) for _, code in letters)
    return [frozenset({word.lower() if any_case else word})] if len(word) >= _SHORTEST else []


def _of_part(name: str, value: Any, before: list[_Part], any_case: bool) -> list[_Words]:
    """Of one part and the letters before it: the parser moves letters out of alternatives that begin alike."""
    if name == "SUBPATTERN":
        _, added, removed, inside = value
        return [] if (added | removed) & I else _sets([*before, *inside], any_case)
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and value[0] >= 1:
        return _sets([*before, *value[2]], any_case)
    if name != "BRANCH":
        return []
    either: _Words = frozenset()
    for branch in value[1]:
        sets = _sets([*before, *branch], any_case)
        if not sets:
            return []
        either |= max(sets, key=_worth)
    return [either] if len(either) <= _MOST_WORDS else []
