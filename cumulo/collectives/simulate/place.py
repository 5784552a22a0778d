"""Which GPU each rank of a job is on. `cumulo simulate network --placement` and the training step call it."""

from dataclasses import dataclass

import numpy as np

from cumulo.base.nearest import did_you_mean
from cumulo.base.quantities import parse_bytes, parse_duration_s
from cumulo.collectives.simulate.fabrics.clos import ClosGraph
from cumulo.collectives.simulate.fabrics.links import FabricGraph, Ints
from cumulo.errors import ConfigError

PLACEMENTS = ("packed", "scattered", "interleaved")


def placed(first: int, last: int, how: str, per_node: int, graph: FabricGraph, seed: int = 0) -> Ints:
    """GPUs first to last, in the order of the ranks; nodes stay whole."""
    if not 0 <= first <= last < graph.ranks:
        raise ConfigError(f"GPUs {first} to {last} are not all among the fabric's 0 to {graph.ranks - 1}")
    gpus = np.arange(first, last + 1)
    if how == "packed" or len(gpus) % per_node:
        return gpus
    nodes = gpus.reshape(-1, per_node)
    if how == "scattered":
        nodes = nodes[np.random.default_rng(seed).permutation(len(nodes))]
    elif how == "interleaved":
        nodes = nodes[interleaved(len(nodes), pods_of(graph))]
    else:
        raise ConfigError(f"--placement must be {', '.join(PLACEMENTS)}, got {how!r}")
    return nodes.ravel()


def pods_of(graph: FabricGraph) -> int:
    """Groups below the top tier."""
    if isinstance(graph, ClosGraph) and len(graph.tiers) > 1:
        return -(-graph.cards // graph.tiers[-2].cards)
    return 1


def interleaved(nodes: int, pods: int) -> Ints:
    """Node after node from another pod: what a scheduler that balances pods does."""
    each = -(-nodes // pods)
    order = np.arange(pods * each).reshape(pods, each).T.ravel()
    return order[order < nodes]


_KEYS = ("gpus", "collective", "algorithm", "size", "start", "background")


@dataclass(frozen=True, slots=True)
class TypedJob:
    name: str
    first: int
    last: int
    collective: str
    algorithm: str
    size_bytes: float
    start_s: float
    background: bool


def parse_job(text: str, collective: str, algorithm: str, size: str) -> TypedJob:
    """What is not typed is taken from the command's own options."""
    name, _, rest = text.partition(":")
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in _KEYS or not equals:
            raise ConfigError(
                f"job {name!r} has no setting {key!r}{did_you_mean(key, _KEYS)}; there are {_KEYS}"
            )
        given[key] = value
    if "gpus" not in given:
        raise ConfigError(f"job {name!r} must say which GPUs it has, as in {name}:gpus=0-511")
    first, _, last = given["gpus"].partition("-")
    if not first.isdigit() or not (last or first).isdigit():
        raise ConfigError(f"job {name!r}: gpus must look like 0-511, got {given['gpus']!r}")
    return TypedJob(
        name,
        int(first),
        int(last or first),
        given.get("collective", collective),
        given.get("algorithm", algorithm),
        parse_bytes(given.get("size", size)),
        parse_duration_s(given.get("start", "0s"), "a time", "look like 500us, 2ms or 1s"),
        given.get("background", "no").lower() in ("yes", "true", "1"),
    )
