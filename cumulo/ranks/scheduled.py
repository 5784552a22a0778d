"""Collectives by our own schedules, where a run asks for it: `--collective all_reduce=ring,all_gather=bruck`, or
`auto` for the tuner's choice, or a profile of `cumulo bench collectives`. The door in `collectives` asks here
first; CPU tensors only, the rest stays with torch.distributed."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.measured import CollectiveProfile
from cumulo.collectives.decide.schedule import COLLECTIVES, Collective, CollectiveSchedule
from cumulo.collectives.decide.tuner import MachineCosts, ProtocolCosts, tune
from cumulo.collectives.play.groups import CollectivePlayer, make_player
from cumulo.collectives.play.shaping import LinkShaper
from cumulo.ranks.groups import Group, world_store

# Processes of one host, through shared memory: what a hop and a byte cost, roughly.
_HOST = MachineCosts(1 << 20, 1, (ProtocolCosts("shm", 20e-6, 15e-6, 15e-6, 4e9, 4e9),), 10e-6)


@dataclass(frozen=True, slots=True)
class CollectiveChoices:
    """What a run was told."""

    algorithms: Mapping[Collective, str] = field(default_factory=dict)
    profile: CollectiveProfile | None = None  # what was measured decides for what has no algorithm of its own
    transport: str = ""  # empty: shared memory on one host, else messages of torch.distributed
    shaper: LinkShaper | None = None  # with tcp: the rank's card, slower than this host


class ScheduledCollectives:
    made = 0

    def __init__(self, choices: CollectiveChoices, timeout_s: float = 300.0) -> None:
        self._choices, self._timeout_s = choices, timeout_s
        # All ranks choose alike, so they count alike; what met under an older number is gone.
        self._number = ScheduledCollectives.made = ScheduledCollectives.made + 1
        self._players: dict[Group, CollectivePlayer] = {}

    def algorithm(self, kind: Collective, tensor: Tensor, ranks: int) -> str | None:
        """Which schedule carries it out; None: torch.distributed does."""
        chosen = self._choices.algorithms.get(kind)
        if chosen is None and self._choices.profile is None:
            return None
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        if self._choices.profile is None or chosen not in (None, "auto"):
            return chosen
        return self._choices.profile.fastest(kind, tensor.nbytes, ranks, chosen)

    def all_reduce(self, tensor: Tensor, group: Group, algorithm: str) -> None:
        self._run("all_reduce", tensor, group, algorithm)

    def all_gather(self, whole: Tensor, own: Tensor, group: Group, algorithm: str) -> None:
        whole.view(group.size(), -1)[group.rank()].copy_(own.reshape(-1))
        self._run("all_gather", whole, group, algorithm)

    def reduce_scatter(self, own: Tensor, whole: Tensor, group: Group, algorithm: str) -> None:
        sums = whole.clone()
        self._run("reduce_scatter", sums, group, algorithm)
        own.view(-1).copy_(sums.view(group.size(), -1)[group.rank()])

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        group: Group,
        rows: tuple[list[int] | None, list[int] | None],
        algorithm: str,
    ) -> None:
        """`rows`: from and to each rank; None: equal runs."""
        ranks, own = group.size(), group.rank()
        receives, sends = ([len(sent) // ranks] * ranks if some is None else some for some in rows)
        width = sent[0].numel() if len(sent) else received[0].numel() if len(received) else 0
        # Of what others send each other this rank knows nothing, and its own steps do not need it.
        pairs = [0] * (ranks * ranks)
        for peer in range(ranks):
            pairs[own * ranks + peer], pairs[peer * ranks + own] = sends[peer] * width, receives[peer] * width
        shape = CollectiveShape(ranks, 0, blocks=tuple(pairs))
        self._playing(group).run(make_schedule("all_to_all", algorithm, shape), sent, received)

    def _run(self, kind: Collective, tensor: Tensor, group: Group, algorithm: str) -> None:
        schedule = scheduled(kind, algorithm, group.size(), tensor.numel(), tensor.element_size())
        self._playing(group).run(schedule, tensor)

    def _playing(self, group: Group) -> CollectivePlayer:
        if group not in self._players:
            self._players[group] = self._player(group)
        return self._players[group]

    def _player(self, group: Group) -> CollectivePlayer:
        """Shared memory on one host; between hosts, messages of torch.distributed."""
        transport = self._choices.transport
        if not transport:
            hosts: list[Any] = [None] * group.size()
            dist.all_gather_object(hosts, socket.gethostname(), group=group)
            transport = "shm" if len(set(hosts)) == 1 else "torch"
        members = dist.get_process_group_ranks(group)
        name = f"{self._number} {group.group_name} {members}"
        return make_player(
            transport,
            group.rank(),
            group.size(),
            world_store(),
            self._timeout_s,
            name,
            group=group,
            shaper=self._choices.shaper,
        )

    def close(self) -> None:
        for player in self._players.values():
            close: Callable[[], None] = getattr(player, "close", lambda: None)
            close()
        self._players.clear()


@lru_cache(maxsize=1024)
def host_seconds(kind: str, size_bytes: int, ranks: int) -> float:
    """What a collective between processes of one host takes, by the cost model."""
    known = next((one for one in COLLECTIVES if one == kind), None)
    return 0.0 if known is None else tune(known, max(1, size_bytes), ranks, _HOST)[0].seconds


@lru_cache(maxsize=1024)
def scheduled(
    kind: Collective, algorithm: str, ranks: int, elements: int, element_size: int
) -> CollectiveSchedule:
    if algorithm == "auto":
        algorithm = tune(kind, max(1, elements * element_size), ranks, _HOST)[0].algorithm
    return make_schedule(kind, algorithm, CollectiveShape(ranks, elements))
