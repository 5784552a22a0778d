"""Collectives by our own schedules, where a run asks for it: `--collective all_reduce=ring,all_gather=bruck`, or
`auto` for the tuner's choice. The door in `collectives` asks here first; CPU tensors only, the rest stays with
torch.distributed."""

import socket
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.schedule import COLLECTIVES, Collective, CollectiveSchedule
from cumulo.collectives.decide.tuner import MachineCosts, ProtocolCosts, tune
from cumulo.collectives.play.groups import CollectivePlayer, make_player
from cumulo.ranks.groups import Group, world_store

# Processes of one host, through shared memory: what a hop and a byte cost, roughly.
_HOST = MachineCosts(1 << 20, 1, (ProtocolCosts("shm", 20e-6, 15e-6, 15e-6, 4e9, 4e9),), 10e-6)


class ScheduledCollectives:
    made = 0

    def __init__(self, choices: dict[Collective, str], timeout_s: float = 300.0) -> None:
        self._choices, self._timeout_s = choices, timeout_s
        # All ranks choose alike, so they count alike; what met under an older number is gone.
        self._number = ScheduledCollectives.made = ScheduledCollectives.made + 1
        self._players: dict[Group, CollectivePlayer] = {}

    def wants(self, kind: Collective, tensor: Tensor) -> bool:
        return kind in self._choices and tensor.device.type == "cpu" and tensor.is_contiguous()

    def all_reduce(self, tensor: Tensor, group: Group) -> None:
        self._run("all_reduce", tensor, group)

    def all_gather(self, whole: Tensor, own: Tensor, group: Group) -> None:
        whole.view(group.size(), -1)[group.rank()].copy_(own.reshape(-1))
        self._run("all_gather", whole, group)

    def reduce_scatter(self, own: Tensor, whole: Tensor, group: Group) -> None:
        sums = whole.clone()
        self._run("reduce_scatter", sums, group)
        own.view(-1).copy_(sums.view(group.size(), -1)[group.rank()])

    def _run(self, kind: Collective, tensor: Tensor, group: Group) -> None:
        if group not in self._players:
            self._players[group] = self._player(group)
        schedule = scheduled(kind, self._choices[kind], group.size(), tensor.numel(), tensor.element_size())
        self._players[group].run(schedule, tensor)

    def _player(self, group: Group) -> CollectivePlayer:
        """Shared memory on one host; between hosts, messages of torch.distributed."""
        hosts: list[Any] = [None] * group.size()
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        transport = "shm" if len(set(hosts)) == 1 else "torch"
        members = dist.get_process_group_ranks(group)
        name = f"{self._number} {group.group_name} {members}"
        return make_player(
            transport, group.rank(), group.size(), world_store(), self._timeout_s, name, group=group
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
