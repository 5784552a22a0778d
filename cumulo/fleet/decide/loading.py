"""Which models of a server are in memory: what to load and what to unload for the requests that wait.

Pure; the server's ModelTable plays it. Requests enter in the order they came: one whose model is loaded enters at
once, unless an earlier one waits for that model's memory, so no model starves another. A model is unloaded only
when none of its requests runs, the least recently used first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LoadState = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model of the server, as a decision sees it."""

    need_bytes: int  # that it takes while it is loaded
    state: LoadState
    running: int  # requests that have entered and not ended
    used_s: float  # when a request last entered or ended
    keep_s: float | None = None  # how long it stays without a request; None: until others need its memory


@dataclass(frozen=True, slots=True)
class LoadPlan:
    load: tuple[str, ...]
    unload: tuple[str, ...]
    enter: tuple[int, ...]  # waiting requests, by their place in the queue


def plan_loads(
    models: Mapping[str, ModelView], waiting: Sequence[str], budget_bytes: float, now_s: float
) -> LoadPlan:
    """`waiting`: the model that each waiting request asks for, in the order they came."""
    free = budget_bytes - sum(one.need_bytes for one in models.values() if one.state != "unloaded")
    # What is free once all that leave have left; promised to the waiting, the earliest first.
    ahead = free + sum(one.need_bytes for one in models.values() if one.state == "unloading")
    load, enter, kept, leaving = list[str](), list[int](), set[str](), set[str]()
    for place, name in enumerate(waiting):
        one = models[name]
        if name in leaving or one.state == "unloading":
            continue  # it is loaded again when it has left
        if one.state == "loaded":
            enter.append(place)
        elif one.state == "unloaded" and name not in kept:
            for victim in _by_last_use(models, kept | leaving):
                if ahead >= one.need_bytes:
                    break
                leaving.add(victim)
                ahead += models[victim].need_bytes
            if (
                ahead < one.need_bytes
            ):  # it waits for those that earlier requests enter: later ones come after it
                leaving |= {other for other in kept if models[other].state == "loaded"}
            ahead -= one.need_bytes
            if free >= one.need_bytes:
                load.append(name)
            free -= one.need_bytes
        kept.add(name)
    idle = {
        name
        for name, one in models.items()
        if one.state == "loaded" and one.keep_s is not None and now_s - one.used_s >= one.keep_s
    }
    unload = [name for name in (leaving | idle) - kept if not models[name].running]
    return LoadPlan(tuple(load), tuple(sorted(unload)), tuple(enter))


def _by_last_use(models: Mapping[str, ModelView], needed: set[str]) -> list[str]:
    """Loaded models that nobody waits for: idle ones first, then those whose requests end by themselves."""
    found = [name for name, one in models.items() if one.state == "loaded" and name not in needed]
    return sorted(found, key=lambda name: (models[name].running > 0, models[name].used_s))
