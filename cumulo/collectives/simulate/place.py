"""Which GPU each rank of a job is on. `cumulo simulate network --placement` and the training step call it."""

import numpy as np

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
