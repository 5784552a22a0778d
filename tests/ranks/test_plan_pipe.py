"""Messages reach every reader, whole and in order, whatever their size; a reader that stops is named."""

import random
import threading
from multiprocessing import Pipe

import numpy as np
import pytest

from cumulo.errors import RanksFailed
from cumulo.ranks.plan_pipe import PlanReader, PlanWriter
from cumulo.ranks.rank_meter import READ, RankTable


def test_every_reader_reads_every_message_in_order() -> None:
    rng = random.Random(0)
    # Some larger than a pipe holds, most so small that several fit.
    messages = [rng.randbytes(rng.choice([1, 40, 700, 1024, 900_000])) for _ in range(60)]
    path = RankTable.create(3)
    pipes = {rank: Pipe() for rank in (1, 2)}
    found: dict[int, list[bytes]] = {1: [], 2: []}

    def read(rank: int) -> None:
        reader = PlanReader(pipes[rank][1], RankTable(path, 3).progress[rank])
        while (message := reader.receive()) is not None:
            found[rank].append(message)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in pipes]
    for thread in threads:
        thread.start()
    writer = PlanWriter({r: ours for r, (ours, _) in pipes.items()}, 30)
    for message in messages:
        writer.send(message)
    for ours, _ in pipes.values():
        ours.close()
    for thread in threads:
        thread.join()
    assert found == {1: messages, 2: messages}
    assert RankTable(path, 3).progress[:, READ].tolist() == [0, 60, 60]
    path.unlink()


def test_a_reader_that_reads_nothing_is_named() -> None:
    (first, first_end), (second, second_end) = Pipe(), Pipe()
    writer = PlanWriter({1: first, 2: second}, timeout_s=0.05)
    reader = PlanReader(first_end, np.zeros(8, np.uint64))
    with pytest.raises(RanksFailed, match=r"rank 2: has read no plan for 0\.05 s"):
        for _ in range(200):
            writer.send(bytes(10_000))
            reader.receive()
    second_end.close()
    with pytest.raises(RanksFailed, match="rank 2: is gone"):
        writer.send(b"plan")
