"""What sending a plan to all ranks costs: `cumulo bench plans` sends plans of 256 rows to 4 reading processes.

Sending is CPU time of the engine's thread: so much later is a step. Arriving is the time until every rank has
unpacked the plan; on a machine with fewer cores than ranks, most of it is the wait for a core.
"""

import os
import pickle
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from cumulo.base.report import Row
from cumulo.engine.decide.plan import StepPlan
from cumulo.ranks.plan_pipe import PlanReader, PlanWriter
from cumulo.ranks.rank_meter import RankTable
from cumulo.ranks.start import RankProcesses, starter, tell_starter

ROWS = 256
RANKS = 4
PLANS = 400
_MUST_US = 100.0


def measure(repeats: int = 5, tell: Callable[[str], None] = lambda _: None) -> list[Row]:
    plan = StepPlan(0, slots=list(range(ROWS)), starts=list(range(1000, 1000 + ROWS)))
    plan.draw_one_each()
    plan.extend = [
        (slot, 7 * slot) for slot in range(0, ROWS, 16)
    ]  # a block of 16 tokens is full now and then
    pipes, tcp = [], []
    for repeat in range(repeats):
        tell(f"pipes, {repeat + 1} of {repeats}")
        pipes.append(_send(plan, over_tcp=False))
        tell(f"TCP, {repeat + 1} of {repeats}")
        tcp.append(_send(plan, over_tcp=True))
    size = len(pickle.dumps(plan, -1))
    note = f"{size:,} bytes, packed and sent"
    return [
        Row(
            f"plan of {ROWS} rows to {RANKS} ranks, pipes", _least(pipes, 0), "µs", "lower",
            must=_MUST_US, note=note,
        ),
        Row("until all have read it", _least(pipes, 1), "µs", "lower", note=f"{os.cpu_count()} cores"),
        Row(f"plan of {ROWS} rows to {RANKS} ranks, TCP", _least(tcp, 0), "µs", "lower", note=note),
        Row("until all have read it, TCP", _least(tcp, 1), "µs", "lower", note=f"{os.cpu_count()} cores"),
    ]  # fmt: skip


def _least(figures: list[tuple[float, float]], column: int) -> float:
    """Other programs can only add."""
    return min(figure[column] for figure in figures)


def _send(plan: StepPlan, over_tcp: bool) -> tuple[float, float]:
    """Median microseconds: of packing and sending, and until the last rank has unpacked."""
    path = RankTable.create(RANKS)
    with ExitStack() as stack:
        stack.callback(path.unlink)
        listener = stack.enter_context(Listener(("127.0.0.1", 0), authkey=b"plans")) if over_tcp else None
        address = None if listener is None else listener.address
        ranks = RankProcesses(_read, range(RANKS), (path, address), preload=(__name__,))
        stack.callback(ranks.end)
        table = RankTable(path, RANKS)
        pipes: dict[int, Connection] = ranks.pipes
        if listener is not None:
            pipes = {rank: listener.accept() for rank in range(RANKS)}
        ranks.wait_for("ready")
        writer = PlanWriter(pipes, 60)
        sent_s, arrived_s = [], []
        for count in range(1, PLANS + 1):
            begun_s, cpu_s = time.perf_counter(), time.thread_time()
            writer.send(pickle.dumps(plan, -1))
            sent_s.append(time.thread_time() - cpu_s)
            while int(table.progress[:, 1].min()) < count:
                time.sleep(0)
            arrived_s.append(time.perf_counter() - begun_s)
        for pipe in pipes.values():
            pipe.close()
    return statistics.median(sent_s) * 1e6, statistics.median(arrived_s) * 1e6


def _read(rank: int, path: Path, address: tuple[str, int] | None) -> None:
    table, connection = RankTable(path, RANKS), starter()
    if address is not None:
        connection = Client(address, authkey=b"plans")
        assert isinstance(connection, Connection)
    plans = PlanReader(connection, table.progress[rank])
    tell_starter("ready")
    while (message := plans.receive()) is not None:
        pickle.loads(message)
        table.progress[rank, 1] += 1
