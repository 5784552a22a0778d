"""The schedules that NCCL's algorithms follow, played once for each shape of group: hops and loads without units.
`lines` multiplies them with what a hop and a byte cost."""

from dataclasses import replace
from functools import cache

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.play_cost import PlayedCost, play_cost

_UNIT = 64  # elements of a block: every share of the buffer is a whole number of them
_MOST_NODES = 256  # of a tree that is played whole; each doubling adds a level, up and down


@cache
def played_ring(kind: str, ranks: int, per_domain: int) -> PlayedCost:
    """Domains of which the last is not full take as many hops as full ones."""
    if kind == "broadcast":
        return play_cost(make_schedule("broadcast", "chain", CollectiveShape(ranks, _UNIT)), per_domain)
    full = -(-ranks // per_domain) * per_domain
    played = play_cost(make_schedule(kind, "ring", CollectiveShape(full, full * _UNIT)), per_domain)
    if full == ranks:
        return played
    own = make_schedule(kind, "ring", CollectiveShape(ranks, ranks * _UNIT))
    return replace(played, near_load=play_cost(own, ranks).near_load, far_load=play_cost(own, 1).far_load)


@cache
def played_tree(domains: int) -> PlayedCost:
    """A double binary tree of domains."""
    levels = 0
    while domains > _MOST_NODES:
        domains, levels = -(-domains // 2), levels + 1
    played = play_cost(make_schedule("all_reduce", "tree", CollectiveShape(domains, domains * _UNIT)), 1)
    return replace(played, far_hops=played.far_hops + 2 * levels)


@cache
def played_chain(members: int) -> PlayedCost:
    """The chain of one domain's members that hangs on the tree."""
    shape = CollectiveShape(members, members * _UNIT, node_size=members)
    return play_cost(make_schedule("all_reduce", "tree", shape), members)


@cache
def played_switch(members: int) -> PlayedCost:
    return play_cost(
        make_schedule("all_reduce", "sharp", CollectiveShape(members, _UNIT, radix=members)), members
    )


@cache
def played_direct(ranks: int, per_domain: int) -> PlayedCost:
    full = -(-ranks // per_domain) * per_domain
    played = play_cost(make_schedule("all_to_all", "direct", CollectiveShape(full, full)), per_domain)
    if full == ranks:
        return played
    far = (ranks - per_domain) / ranks
    return replace(played, near_load=(per_domain - 1) / ranks, far_rank_load=far, most_messages=ranks - 1)


@cache
def played_pair(far: bool) -> PlayedCost:
    return play_cost(make_schedule("broadcast", "chain", CollectiveShape(2, _UNIT)), 1 if far else 2)
