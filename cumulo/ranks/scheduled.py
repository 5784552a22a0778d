"""Collectives by our own schedules, where a run asks for it: `--collective all_reduce=ring,all_gather=bruck`, or
`auto` for the tuner's choice, or a profile of `cumulo bench collectives`. The door in `collectives` asks here
first; CPU tensors only, the rest stays with torch.distributed."""

import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache

import torch.distributed as dist
from torch import Tensor

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.measured import CollectiveProfile
from cumulo.collectives.decide.schedule import COLLECTIVES, Collective, CollectiveSchedule
from cumulo.collectives.decide.tuner import MachineCosts, ProtocolCosts, tune
from cumulo.collectives.play.groups import make_player
from cumulo.collectives.play.messages import MessagePlayer
from cumulo.ranks.groups import Group, world_store

# Processes of one host, through shared memory: what a hop and a byte cost, roughly.
_HOST = MachineCosts(1 << 20, 1, (ProtocolCosts("shm", 20e-6, 15e-6, 15e-6, 4e9, 4e9),), 10e-6)


@dataclass(frozen=True, slots=True)
class CollectiveChoices:
    """What a run was told."""

    algorithms: Mapping[Collective, str] = field(default_factory=dict)
    profile: CollectiveProfile | None = None  # what was measured decides for what has no algorithm of its own
    transport: str = ""  # empty: shared memory on one host, else messages of torch.distributed


class ScheduledCollectives:
    made = 0

    def __init__(self, choices: CollectiveChoices, timeout_s: float = 300.0) -> None:
        self._choices, self._timeout_s = choices, timeout_s
        # All ranks choose alike, so they count alike; what met under an older number is gone.
        self._number = ScheduledCollectives.made = ScheduledCollectives.made + 1
        self._players: dict[tuple[Group, bool], MessagePlayer] = {}
        # What is started, and not waited for, runs here in the order of its starts, with players of its own.
        self._thread: ThreadPoolExecutor | None = None
        self._here = threading.local()

    def start(self, call: Callable[[], None]) -> "ScheduledWork":
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "collectives")

        def run() -> None:
            self._here.started = True
            call()

        return ScheduledWork(self._thread.submit(run))

    def algorithm(self, kind: Collective, tensor: Tensor, ranks: int) -> str | None:
        """Which schedule carries it out; None: torch.distributed does."""
        chosen = self._choices.algorithms.get(kind)
        if chosen is None and self._choices.profile is None:
            return None
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        if self._choices.profile is None or chosen not in (None, "auto") or kind == "all_to_all":
            return chosen  # what ranks send to all differs in size, and all must choose alike
        return self._choices.profile.fastest(kind, tensor.nbytes, ranks, chosen)

    def all_reduce(self, tensor: Tensor, group: Group, algorithm: str) -> None:
        self._run("all_reduce", tensor, group, algorithm)

    def all_gather(self, whole: Tensor, own: Tensor, group: Group, algorithm: str) -> None:
        whole.view(group.size(), -1)[group.rank()].copy_(own.reshape(-1))
        self._run("all_gather", whole, group, algorithm)

    def reduce_scatter(self, own: Tensor, whole: Tensor, group: Group, algorithm: str) -> None:
        sums = whole.clone()
        self._run("reduce_scatter", sums, group, algorithm)
        own.copy_(sums.view(group.size(), *own.shape)[group.rank()])

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        rows: tuple[list[int] | None, list[int] | None],
        group: Group,
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

    def _playing(self, group: Group) -> MessagePlayer:
        key = (group, getattr(self._here, "started", False))
        if key not in self._players:
            self._players[key] = self._player(*key)
        return self._players[key]

    def _player(self, group: Group, started: bool) -> MessagePlayer:
        """Shared memory on one host; between hosts, messages of torch.distributed."""
        transport = self._choices.transport
        members = dist.get_process_group_ranks(group)
        name = f"{self._number} {group.group_name} {members} {started}"
        if not transport:
            transport = "shm" if len(self._hosts(group, name)) == 1 else "torch"
        return make_player(transport, group.rank(), group.size(), world_store(), self._timeout_s, name, group)

    def _hosts(self, group: Group, name: str) -> set[str]:
        """By the store: the group's own messages have an order that a started collective is not in."""
        store = world_store()
        store.set(f"host {name} {group.rank()}", socket.gethostname())
        return {store.get(f"host {name} {rank}").decode() for rank in range(group.size())}

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        for player in self._players.values():
            player.close()
        self._players.clear()


class ScheduledWork(dist.Work):
    """A collective on its way."""

    def __init__(self, future: Future[None]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.result()
        return True

    def is_completed(self) -> bool:
        return self._future.done()


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
