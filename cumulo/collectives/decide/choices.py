"""What a run asks for with `--collective`: an algorithm for each collective. Configurations and the door in `ranks`
read it."""

from cumulo.collectives.decide.catalog import algorithms
from cumulo.collectives.decide.schedule import COLLECTIVES, Collective
from cumulo.errors import ConfigError

_TUNED: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
_ASKED: tuple[Collective, ...] = (*_TUNED, "all_to_all")
# A rank knows what it sends and what it gets, not what others send each other: tokens are passed on by nobody.
_DIRECT = ("pairwise", "direct")


def split_profile(text: str) -> tuple[str, str]:
    """(algorithms, path of a profile) of a text such as `all_reduce=ring,profile=FILE`."""
    parts = [part.strip() for part in text.split(",")] if text else []
    paths = [part.removeprefix("profile=") for part in parts if part.startswith("profile=")]
    return ",".join(part for part in parts if not part.startswith("profile=")), paths[-1] if paths else ""


def parse_choices(text: str) -> dict[Collective, str]:
    """`all_reduce=ring,all_gather=bruck`; auto: the tuner chooses all but all_to_all; empty: none."""
    if not text:
        return {}
    if text == "auto":
        return dict.fromkeys(_TUNED, "auto")
    found: dict[Collective, str] = {}
    for part in text.split(","):
        name, _, algorithm = part.partition("=")
        kind = next((one for one in COLLECTIVES if one == name.strip()), None)
        if kind not in _ASKED:
            raise ConfigError(
                f"collective {part!r}: give NAME=ALGORITHM with NAME one of {', '.join(_ASKED)}, or auto"
            )
        known = _DIRECT if kind == "all_to_all" else (*algorithms(kind), "auto")
        if algorithm.strip() not in known:
            raise ConfigError(
                f"{kind} cannot be carried out by {algorithm.strip()!r}; there are {', '.join(known)}"
            )
        found[kind] = algorithm.strip()
    return found
