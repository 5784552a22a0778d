"""CollectiveProfile: what `cumulo bench collectives --profile FILE` measured, and which algorithm it says is the
fastest. Training and serving choose by it, or by what a run asks for with `--collective`. A size between two that
were measured lies on a straight line in the logarithms."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cumulo.base.files import read_text_file
from cumulo.collectives.decide.catalog import algorithms
from cumulo.collectives.decide.schedule import COLLECTIVES, Collective
from cumulo.errors import ConfigError

_PEER = "gloo"
Curve = tuple[tuple[float, float], ...]  # (bytes, seconds), by size


@dataclass(frozen=True)
class CollectiveProfile:
    curves: Mapping[tuple[str, int], Mapping[str, Curve]]  # (collective, ranks) -> algorithm -> times

    def times(self, kind: str, size_bytes: float, ranks: int) -> dict[str, float]:
        """The seconds of every algorithm that was measured so, gloo's with it; empty: none was."""
        found = self.curves.get((kind, ranks), {})
        return {algorithm: between(curve, size_bytes) for algorithm, curve in found.items()}

    def ours(self, kind: str, size_bytes: float, ranks: int) -> tuple[str, float]:
        """The fastest of our algorithms, and its seconds."""
        times = self.times(kind, size_bytes, ranks)
        times.pop(_PEER, None)
        if not times:
            raise ConfigError(
                f"the profile has no {kind} of {ranks} ranks; measure it with "
                f"`cumulo bench collectives --ranks {ranks} --profile FILE`"
            )
        best = min(times, key=lambda name: times[name])
        return best, times[best]

    def fastest(
        self, kind: Collective, size_bytes: float, ranks: int, otherwise: str | None = None
    ) -> str | None:
        """The fastest algorithm; None: gloo is. `otherwise`: the answer where nothing was measured."""
        times = self.times(kind, size_bytes, ranks)
        if not times:
            return otherwise
        best = min(times, key=lambda name: times[name])
        return None if best == _PEER else best


def read_collective_profile(path: str) -> CollectiveProfile | None:
    """The profile in a file; None: no path was given."""
    if not path:
        return None
    text = read_text_file(Path(path), "the profile of collectives")
    try:
        return collective_profile(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a profile of `cumulo bench collectives --profile FILE`: {type(error).__name__} {error}"
        ) from error


def collective_profile(data: Mapping[str, Any]) -> CollectiveProfile:
    points: dict[tuple[str, int], dict[str, list[tuple[float, float]]]] = {}
    for row in data["rows"]:
        kind = next((one for one in COLLECTIVES if one == row["collective"]), None)
        if kind is None or row["algorithm"] not in (*algorithms(kind), _PEER):
            raise ValueError(f"it has no algorithm {row['algorithm']} of {row['collective']}")
        if row["bytes"] <= 0 or row["seconds"] <= 0:
            raise ValueError("sizes and times must be more than 0")
        curves = points.setdefault((kind, int(row["ranks"])), {})
        curves.setdefault(row["algorithm"], []).append((float(row["bytes"]), float(row["seconds"])))
    return CollectiveProfile(
        {key: {name: tuple(sorted(some)) for name, some in curves.items()} for key, curves in points.items()}
    )


def between(points: Sequence[tuple[float, float]], size: float) -> float:
    if size <= points[0][0] or len(points) == 1:
        return points[0][1]
    for (low, low_s), (high, high_s) in pairwise(points):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return math.exp(math.log(low_s) * (1 - share) + math.log(high_s) * share)
    return points[-1][1] * size / points[-1][0]


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
