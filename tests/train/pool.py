"""A pool of gloo processes that tests of distributed code run their ranks in.

    results = run_ranks(function, 4, arguments)     # function(rank, arguments) in 4 processes: a list of 4 results

`function` is a module's own (it travels by name); inside it `torch.distributed` is set up with one rank per
process. Processes are forked from one that has torch imported already, and end with their case: gloo's threads of
groups that are still referred to would stay, and spin. A rank that raises, dies or hangs ends its case with a
`RanksFailed` that says which rank, why and where the others stood.
"""

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MOST_RANKS = 8
_GRACE_S = 3.0  # after one rank has failed, the others have this long to see it themselves


class RanksFailed(AssertionError):
    """What went wrong on which rank, and the stacks of those that were still waiting."""


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path  # where it writes its stacks when told to

    def stack_text(self) -> str:
        """Where all its threads stand now."""
        if self.process.pid is None or not self.process.is_alive():
            return f"(gone, exit code {self.process.exitcode})"
        before = self.stacks.stat().st_size if self.stacks.exists() else 0
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and self.stacks.stat().st_size == before:
            time.sleep(0.02)
        time.sleep(0.05)
        return self.stacks.read_bytes()[before:].decode(errors="replace")


class Pool:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # What ranks import, and what torch imports at the first step of an optimizer.
        self._context.set_forkserver_preload(["tests.train.pool", "cumulo.train.run.verify", "torch._dynamo"])
        self._folder = Path(tempfile.mkdtemp(prefix="cumulo-ranks-"))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._cases = 0

    def run(
        self, function: Callable[..., Any], world: int, *arguments: Any, timeout_s: float = 60
    ) -> list[Any]:
        """The results of `function(rank, *arguments)`, by rank."""
        if not 1 <= world <= MOST_RANKS:
            raise ValueError(f"the pool has {MOST_RANKS} processes, {world} were asked for")
        self._cases += 1
        workers = [self._start(rank) for rank in range(world)]
        self._workers += workers
        for rank, worker in enumerate(workers):
            worker.pipe.send_bytes(pickle.dumps((self._cases, rank, world, timeout_s, function, arguments)))
        results, failures = self._collect(workers, timeout_s)
        self._discard(workers)
        if failures:
            # A lost connection is what others see of a rank's failure: causes first.
            raise RanksFailed("\n".join(sorted(failures.values(), key=lambda text: "by peer" in text)))
        return [results[rank] for rank in range(world)]

    def _collect(self, workers: list[_Worker], timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting = dict(enumerate(workers))
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            ready = wait([worker.pipe for worker in waiting.values()], left_s)
            for rank, worker in list(waiting.items()):
                if worker.pipe not in ready:
                    continue
                del waiting[rank]
                try:
                    succeeded, value = pickle.loads(worker.pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    worker.process.join(2)
                    succeeded, value = False, f"died, exit code {worker.process.exitcode}"
                if succeeded:
                    results[rank] = value
                else:
                    failures[rank] = f"rank {rank}: {value}"
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        why = "still waiting when another rank had failed" if failures else f"not done after {timeout_s:g} s"
        for rank, worker in waiting.items():
            failures[rank] = f"rank {rank}: {why}; it stood at\n{worker.stack_text()}"
        return results, failures

    def _start(self, rank: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        stacks = self._folder / f"stacks-{self._cases}-{rank}"
        process = self._context.Process(
            target=_serve, args=(theirs, self._store.port, str(stacks)), daemon=True
        )
        process.start()
        theirs.close()
        return _Worker(process, ours, stacks)

    def _discard(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.pipe.close()
            worker.process.kill()
        for worker in workers:
            worker.process.join(5)
            self._workers.remove(worker)

    def close(self) -> None:
        self._discard(list(self._workers))
        for file in self._folder.iterdir():
            file.unlink()
        self._folder.rmdir()


@cache
def _shared() -> Pool:
    pool = Pool()
    atexit.register(pool.close)
    return pool


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, timeout_s: float = 60) -> list[Any]:
    """The results of `function(rank, *arguments)` in `world` processes of the pool all tests share."""
    return _shared().run(function, world, *arguments, timeout_s=timeout_s)


def _serve(pipe: Connection, port: int, stacks: str) -> None:
    """A process of the pool: one rank of one case."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # Kept open for as long as the process lives: that is where stacks go.
    faulthandler.register(signal.SIGUSR1, file=Path(stacks).open("w"), all_threads=True)  # noqa: SIM115
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        case, rank, world, timeout_s, function, arguments = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        return
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"case-{case}", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        try:
            answer = pickle.dumps((True, function(rank, *arguments)))
        finally:
            dist.destroy_process_group()
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    pipe.send_bytes(answer)
    pipe.close()
