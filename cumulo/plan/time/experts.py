"""Tokens that travel once to each rank that wants them: how many, and their seconds. `communication` asks."""

import math

from cumulo.plan.network.collectives import Network, collective_s
from cumulo.spec.model import MoESpec


def exchanged_s(stream_bytes: float, moe: MoESpec, network: Network, ranks: int, stride: int) -> float:
    """Seconds in which each rank's tokens reach their experts where a token travels once to each domain that wants
    it, and there once to each rank."""
    group = network.group(ranks, stride)
    reach = group.reach
    near_bytes = stream_bytes * distinct(reach.ranks, moe)
    near_s = collective_s("all_to_all", near_bytes, network.group(reach.per_domain, stride))
    if reach.domains == 1:
        return near_s
    return max(near_s, collective_s("all_to_all", stream_bytes * distinct(reach.domains, moe), group))


def distinct(places: int, moe: MoESpec) -> float:
    """Of the places that experts are spread over, how many a token's experts are in, if routing is even: k choices
    of n places name n·(1 − (1 − 1/n)^k) different ones. Limited to t of G groups (DeepSeek-AI 2024, section 2.1.2),
    the choices are among the n·(1 − C(G − G/n, t)/C(G, t)) places that have such a group."""
    able = float(places)
    if moe.top_groups < moe.groups and moe.groups % places == 0:
        others = moe.groups - moe.groups // places
        able *= 1 - math.comb(others, moe.top_groups) / math.comb(moe.groups, moe.top_groups)
    return able * (1 - (1 - 1 / able) ** moe.experts_per_token)
