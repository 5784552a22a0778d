"""How much structure a JSON body has, counted before anything is made of it. Called by BodyReader for every body.

Parsing and validating cost time and memory per value, not per byte: 4 MiB of text is one string, 4 MiB of `{},` are
1.4 million objects. So a body is refused by what it has too many of. Three counts, each far above honest use:

- objects and lists: a conversation has one per message, part and tool call, and some per tool;
- strings, keys included;
- values in all: what is left are numbers, of which a prompt given as tokens has as many as the context;
- digits of a number: the time to read an integer grows with the square of its digits.

Commas and brackets inside strings do not count. A parser that meets a mistake stops there, and up to a mistake the
counts are exact, so they bound the work on broken bodies, too.
"""

from dataclasses import dataclass

MAX_CONTAINERS = 16_384  # objects and lists
MAX_STRINGS = 65_536  # keys included
MAX_VALUES = 327_680  # OpenAI's API takes 300,000 tokens in one request for embeddings
MAX_DIGITS = 128  # in a row

_ALL_NINES = bytes.maketrans(b"012345678", b"999999999")


@dataclass(frozen=True, slots=True)
class Structure:
    """How much structure a body has. An empty container counts as if it held a value."""

    containers: int = 0
    strings: int = 0
    values: int = 0
    long_number: bool = False

    def excess(self, most: "Structure") -> str | None:
        """What is too much, in words for the client; None if nothing is."""
        if self.long_number:
            return f"the body has a number of more than {MAX_DIGITS} digits: no field takes one"
        for count, bound, what in (
            (self.containers, most.containers, "objects and lists"),
            (self.strings, most.strings, "strings (keys included)"),
            (self.values, most.values, "values"),
        ):
            if count > bound:
                return (
                    f"the body has more than {bound:,} {what}, the most this server takes in one request: "
                    "send less at a time"
                )
        return None


def structure_of(body: bytes) -> Structure:
    """Counts what is outside of strings. Of a body with too many strings nothing else is counted."""
    quotes_only = body.replace(rb"\\", b"").replace(
        rb"\"", b""
    )  # every quote that is left begins or ends a string
    strings = quotes_only.count(b'"') // 2
    if strings > MAX_STRINGS:
        return Structure(strings=strings)
    outside = b'"'.join(quotes_only.split(b'"')[::2])
    containers = outside.count(b"{") + outside.count(b"[")
    long_number = b"9" * (MAX_DIGITS + 1) in outside.translate(_ALL_NINES)
    return Structure(containers, strings, outside.count(b",") + containers + 1, long_number)
