"""Messages reach every reader, whole and in order, whatever their size; a reader that stops is named."""

import random
import threading
from multiprocessing import Pipe

import pytest

from cumulo.errors import RanksFailed
from cumulo.ranks.plan_ring import PlanReader, PlanWriter, RingFile


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "pipes alone"])
def test_every_reader_reads_every_message_in_order(shared: bool) -> None:
    rng = random.Random(0)
    # Some larger than the whole ring, most so small that several fit.
    messages = [rng.randbytes(rng.choice([1, 40, 700, 1024, 9000])) for _ in range(200)]
    path = RingFile.create(3, ring_bytes=4096)
    pipes = {rank: Pipe() for rank in (1, 2)}
    found: dict[int, list[bytes]] = {1: [], 2: []}

    def read(rank: int) -> None:
        reader = PlanReader(RingFile(path, 3) if shared else None, rank, pipes[rank][1])
        while (message := reader.receive()) is not None:
            found[rank].append(bytes(message))

    threads = [threading.Thread(target=read, args=(rank,)) for rank in pipes]
    for thread in threads:
        thread.start()
    writer = PlanWriter(
        RingFile(path, 3) if shared else None, {r: ours for r, (ours, _) in pipes.items()}, 30
    )
    for message in messages:
        writer.send(message)
    for ours, _ in pipes.values():
        ours.close()
    for thread in threads:
        thread.join()
    path.unlink()
    assert found == {1: messages, 2: messages}


def test_a_reader_that_reads_nothing_is_named() -> None:
    path = RingFile.create(3, ring_bytes=4096)
    (first, first_end), (second, second_end) = Pipe(), Pipe()
    writer = PlanWriter(RingFile(path, 3), {1: first, 2: second}, timeout_s=0.05)
    reader = PlanReader(RingFile(path, 3), 1, first_end)
    with pytest.raises(RanksFailed, match=r"rank 2: has read no plan for 0\.05 s"):
        for _ in range(9):
            writer.send(bytes(1000))
            reader.receive()
    second_end.close()
    writer = PlanWriter(RingFile(path, 3), {1: first, 2: second}, timeout_s=5)
    with pytest.raises(RanksFailed, match="rank 2: is gone"):
        writer.send(b"plan")
    path.unlink()
