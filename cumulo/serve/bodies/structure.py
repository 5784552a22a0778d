"""How much structure a JSON body has, counted before anything is made of it. Called by BodyReader for every body.

Parsing and validating cost time and memory per value, not per byte: 4 MiB of text is one string, 4 MiB of `{},` are
1.4 million objects. So a body is refused by what it has too many of. Three counts, each far above honest use:

- objects and lists: a conversation has one per message, part and tool call, and some per tool;
- strings, keys included;
- values in all: what is left are numbers, of which a prompt given as tokens has as many as the context;
- digits of a number: the time to read an integer grows with the square of its digits.

Commas and brackets inside strings do not count. In a small body they are counted all the same at first, because
that takes microseconds; only where there are too many, and in large bodies, strings are told from structure. That
is done with numpy, which lets other threads run, in pieces, and ends at the piece that is too much. A parser that
meets a mistake stops there, and up to a mistake the counts are exact, so they bound the work on broken bodies, too.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_CONTAINERS = 16_384  # objects and lists
MAX_STRINGS = 65_536  # keys included
MAX_VALUES = 327_680  # OpenAI's API takes 300,000 tokens in one request for embeddings
MAX_DIGITS = 128  # in a row; in the worst case a few less are refused

_PIECE_BYTES = 1 << 16  # its arrays stay in a core's cache
_QUOTE, _BACKSLASH, _COMMA, _BRACE, _BRACKET = b'"\\,{['
_ZERO = np.uint8(ord("0"))


@dataclass(frozen=True, slots=True)
class Structure:
    """How much structure a body has: upper bounds, or exact counts."""

    containers: int = 0
    strings: int = 0
    values: int = 0
    long_number: bool = False

    def excess(self, most_values: int = MAX_VALUES) -> str | None:
        """What is too much, in words for the client; None if nothing is."""
        if self.long_number:
            return f"the body has a number of more than {MAX_DIGITS} digits: no field takes one"
        for count, most, what in (
            (self.containers, MAX_CONTAINERS, "objects and lists"),
            (self.strings, MAX_STRINGS, "strings (keys included)"),
            (self.values, most_values, "values"),
        ):
            if count > most:
                return (
                    f"the body has more than {most:,} {what}, the most this server takes in one request: "
                    "send less at a time"
                )
        return None


def excess(body: bytes, most_values: int = MAX_VALUES) -> str | None:
    """What a body has too much of; None if it may be parsed."""
    if len(body) <= _PIECE_BYTES and rough_structure(body).excess(most_values) is None:
        return None
    return exact_structure(body, most_values).excess(most_values)


def rough_structure(body: bytes) -> Structure:
    """Counts every comma, bracket and quote, also those inside strings."""
    containers = body.count(b"{") + body.count(b"[")
    return Structure(containers, body.count(b'"') // 2, body.count(b",") + containers + 1)


def exact_structure(body: bytes, most_values: int = MAX_VALUES) -> Structure:
    """Up to the piece with which a limit is passed: the rest of such a body is not looked at."""
    letters = np.frombuffer(body, np.uint8)
    containers = quotes = commas = 0
    inside = escaped = False  # how a piece begins: in a string, behind a backslash
    counted = Structure()
    for start in range(0, len(letters), _PIECE_BYTES):
        piece = letters[start : start + _PIECE_BYTES]
        marks = piece == _QUOTE
        if escaped or (piece == _BACKSLASH).any():
            behind, escaped = _behind_backslash(piece, escaped)
            marks &= ~behind
        # True from an opening quote up to the letter before the closing one.
        within = np.bitwise_xor.accumulate(marks)
        outside = within if inside else ~within
        containers += int(np.count_nonzero(((piece == _BRACE) | (piece == _BRACKET)) & outside))
        commas += int(np.count_nonzero((piece == _COMMA) & outside))
        quotes += int(np.count_nonzero(marks))
        inside ^= bool(within[-1])
        digits = ((piece - _ZERO) < 10) & outside
        long_number = int(np.count_nonzero(digits)) > MAX_DIGITS and _has_run(digits)
        counted = Structure(containers, quotes // 2, commas + containers + 1, long_number)
        if counted.excess(most_values) is not None:
            break
    return counted


def _has_run(digits: NDArray[np.bool_]) -> bool:
    """Whether there are MAX_DIGITS in a row: each round doubles the length of the rows that are known."""
    length = 1
    while length < MAX_DIGITS and len(digits) > length:
        digits = digits[length:] & digits[:-length]
        length *= 2
    return bool(digits.any())


def _behind_backslash(piece: NDArray[np.uint8], first_is: bool) -> tuple[NDArray[np.bool_], bool]:
    """Which letters have an odd number of backslashes directly before them, and whether the letter after this piece
    has. `first_is`: the first letter has."""
    backslashes = piece == _BACKSLASH
    if first_is:
        backslashes[0] = False  # it is what a backslash stands before, and begins no run of its own
    starts = backslashes.copy()
    starts[1:] &= ~backslashes[:-1]
    places = np.arange(len(piece), dtype=np.int32)
    run_start = np.maximum.accumulate(np.where(starts, places, 0))
    odd = backslashes & (((places - run_start) & 1) == 0)  # the first, third, ... of a run
    behind = np.empty_like(backslashes)
    behind[0], behind[1:] = first_is, odd[:-1]
    return behind, bool(odd[-1])
