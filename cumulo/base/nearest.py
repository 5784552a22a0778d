"""The nearest known name to one that is not known: "did you mean ...?" at the end of an error."""

import difflib
from collections.abc import Collection, Iterable

from cumulo.errors import ConfigError


def nearest(name: str, known: Iterable[str], count: int = 1, likeness: float = 0.6) -> list[str]:
    """At most `count` known names that are like `name`, the most like first."""
    return difflib.get_close_matches(name, list(known), count, likeness)


def did_you_mean(name: str, known: Iterable[str], quoted: bool = False, otherwise: str | None = None) -> str:
    """The end of a sentence: which name was meant; where none is near, `otherwise`, or which names there are."""
    names = list(known)
    if close := nearest(name, names):
        return f"; did you mean {close[0]!r}?" if quoted else f"; did you mean {close[0]}?"
    return f"; there are: {', '.join(names)}" if otherwise is None else otherwise


def names_in(text: str, option: str = "", known: Collection[str] = ()) -> list[str]:
    """The names in a list with commas, each once. `known`: what the option takes, and nothing else."""
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if known and name not in known:
            raise ConfigError(f"{option} takes {', '.join(known)}; got {name!r}")
    return list(names)
