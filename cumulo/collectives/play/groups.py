"""A player by the name of its transport, for ranks that can reach a store. The command, benchmarks and the door in
`ranks` make one."""

from typing import Literal, Protocol, get_args

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from cumulo.collectives.decide.schedule import CollectiveSchedule
from cumulo.collectives.play.messages import MessagePlayer
from cumulo.collectives.play.shaping import LinkShaper
from cumulo.collectives.play.shared_memory import SharedMemoryPlayer
from cumulo.collectives.play.sockets import SocketExchange
from cumulo.collectives.play.torch_messages import TorchExchange
from cumulo.errors import ConfigError

Transport = Literal["shm", "tcp", "torch"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


class CollectivePlayer(Protocol):
    def run(self, schedule: CollectiveSchedule, tensor: Tensor, received: Tensor | None = None) -> None: ...


def make_player(
    transport: str,
    rank: int,
    nodes: int,
    store: Store,
    timeout_s: float = 60.0,
    name: str = "world",
    group: ProcessGroup | None = None,
    shaper: LinkShaper | None = None,
) -> CollectivePlayer:
    """`nodes`: ranks, and switches that are played by processes. All of them call it. `group`: whose members
    messages of torch.distributed go to; None: all ranks. `shaper`: the card that TCP's bytes pass."""
    own = PrefixStore(f"collectives {name}", store)
    if transport == "shm":
        return SharedMemoryPlayer(rank, nodes, own, timeout_s)
    if transport == "tcp":
        return MessagePlayer(rank, SocketExchange(rank, own, timeout_s, shaper=shaper))
    if transport == "torch":
        return MessagePlayer(rank, TorchExchange(group, timeout_s))
    raise ConfigError(f"there is no transport {transport!r}; there are {', '.join(TRANSPORTS)}")
