"""Messages between devices of several hosts: what members show is brought to all, in pieces of any size, and a
rehearsal sends nothing. Ranks are threads with addresses of their own; CPU tensors stand for those of a GPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("torch.distributed", reason="this torch has no distributed package")

from cumulo.errors import ConfigError
from cumulo.ranks import device_group
from cumulo.ranks.device_group import NcclGroup, StagedGroup
from cumulo.ranks.peer_memory import MirroredMemory, bring
from cumulo.ranks.rank_group import RankGroup, meeting_point

CPU = torch.device("cpu")


def together(ranks: int, play: Callable[[StagedGroup], Any]) -> list[Any]:
    store = meeting_point()

    def rank(number: int) -> Any:
        own = meeting_point(store.port)
        group = RankGroup(own, "all", tuple(range(ranks)), number, 60.0, host=f"127.0.0.{number + 2}")
        return play(StagedGroup(group, CPU))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks)))


def exchange(group: StagedGroup) -> list[Any]:
    memory = MirroredMemory(4096, group, CPU)
    first, second = memory.carve((7,), torch.float32), memory.carve((3, 5), torch.int32)
    first.own.fill_(10.0 + group.index)
    second.own.copy_(torch.arange(15).view(3, 5) + 100 * group.index)
    memory.waits = False  # a rehearsal
    bring(memory, second, second.own)
    before = copies(memory, second.own, second.addresses.tolist())
    memory.waits = True
    assert not memory.waits  # kernels have nothing to wait for
    bring(memory, second, second.own[:2])
    bring(memory, first, first.own)
    after = copies(memory, second.own, second.addresses.tolist())
    numbers = torch.tensor([group.index, -group.index, 5], dtype=torch.int32)
    group.largest(numbers)
    return [before, after, copies(memory, first.own, first.addresses.tolist()), numbers.tolist()]


def copies(memory: MirroredMemory, own: torch.Tensor, addresses: list[int]) -> list[list[float]]:
    """What a kernel would read of each member."""
    held, base = memory._copies, memory._copies.data_ptr()
    begins = [address - base for address in addresses]
    return [held.view(-1)[begin : begin + own.nbytes].view(own.dtype).tolist() for begin in begins]


def test_what_members_show_is_read_at_the_addresses_that_kernels_get() -> None:
    for rank, (before, after, first, largest) in enumerate(together(3, exchange)):
        for member in range(3):
            shown = [100 * member + number for number in range(15)]
            assert before[member] == (shown if member == rank else [0] * 15)
            # Of the last row nothing was shown.
            assert after[member] == (shown if member == rank else shown[:10] + [0] * 5)
            assert first[member] == [10.0 + member] * 7
        assert largest == [2, 0, 5]


def pass_on(group: StagedGroup) -> list[list[float]]:
    """A pipeline: each adds to what came, and sends more than the next has taken yet."""
    found = []
    for turn in range(4):
        stream = torch.full((2, 3), float(turn))
        if group.index:
            group.receive(stream, group.index - 1)
        stream += 10.0 ** (group.index + 1)
        found.append(stream.view(-1).tolist())
        if group.index + 1 < group.size:
            group.send(stream, group.index + 1)
            stream.fill_(torch.nan)  # it may be overwritten
    group.largest(torch.zeros(1))  # nobody leaves before all have received
    return found


def test_streams_arrive_whole_and_in_order() -> None:
    assert together(3, pass_on)[2] == [[1110.0 + turn] * 6 for turn in range(4)]


def test_a_pytorch_without_nccl_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_group, "has_nccl", lambda: False)
    with pytest.raises(ConfigError, match="rank_backend=gloo"):
        NcclGroup(meeting_point(), "one", (0,), 0, 5.0, torch.device("cuda"))
