"""What a run asks for with `--collective`: an algorithm for each collective. Configurations and the door in `ranks`
read it."""

from cumulo.collectives.decide.catalog import algorithms
from cumulo.collectives.decide.schedule import COLLECTIVES, Collective
from cumulo.errors import ConfigError

_ASKED: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def parse_choices(text: str) -> dict[Collective, str]:
    """`all_reduce=ring,all_gather=bruck`; auto: the tuner chooses all of them; empty: none."""
    if not text:
        return {}
    if text == "auto":
        return dict.fromkeys(_ASKED, "auto")
    found: dict[Collective, str] = {}
    for part in text.split(","):
        name, _, algorithm = part.partition("=")
        kind = next((one for one in COLLECTIVES if one == name.strip()), None)
        if kind not in _ASKED:
            raise ConfigError(
                f"collective {part!r}: give NAME=ALGORITHM with NAME one of {', '.join(_ASKED)}, or auto"
            )
        if algorithm.strip() not in (*algorithms(kind), "auto"):
            raise ConfigError(
                f"there is no {kind} algorithm {algorithm.strip()!r}; there are {', '.join(algorithms(kind))}"
            )
        found[kind] = algorithm.strip()
    return found
