"""Starting and ending ranks: how a process joins the others, and how functions are run as ranks on this machine.

    results = run_ranks(function, 4, arguments)     # function(rank, *arguments) in 4 processes: a list of 4 results

Layout verification, benchmarks and tests call `run_ranks`; training starts a command with `launch.py`, whose ranks
join here, too. `function` is a module's own (it travels by name). Processes are forked from one that has imported
torch, and end with their case: gloo's threads of groups that are still referred to would stay, and spin. A rank
that raises, dies or hangs ends its case with a `RanksFailed` that says which rank, why and where the others stood.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cumulo.errors import CumuloError

_GRACE_S = 3.0  # after one rank has failed, the others have this long to see it themselves
_COLLECTIVE_S = 300.0  # how long a collective may take where the whole case has no limit


class RanksFailed(CumuloError):
    """What went wrong on which rank, and the stacks of those that were still waiting."""


@contextmanager
def join_ranks(
    rank: int, world: int, timeout: timedelta, *, gpu: bool = False, store: TCPStore | None = None
) -> Iterator[None]:
    """This process is a rank, until it ends; one that fails leaves the others to the end of its process. `store`:
    where they meet; None: where torchrun's environment says."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", rank=rank, world_size=world, timeout=timeout, store=store
    )
    yield
    dist.destroy_process_group()


def lost_another(error: BaseException) -> bool:
    """Whether it is what a rank sees of the death of another: not worth a traceback of its own."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        word in text for word in ("gloo", "nccl", "connection", "broken pipe", "store")
    )


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    timeout_s: float | None = 60,
    threads: int = 1,
    heard: Callable[[Any], None] = lambda message: None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """The results of `function(rank, *arguments)` by rank, in `world` processes over gloo.

    `heard` is given what a rank tells with `tell_starter`. `preload`: modules that the processes are forked with;
    only the first call's count.
    """
    context = multiprocessing.get_context("forkserver")
    # The optimizer's first step imports the last one.
    context.set_forkserver_preload([__name__, *(preload or (function.__module__,)), "torch._dynamo"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit_s = _COLLECTIVE_S if timeout_s is None else timeout_s
    with tempfile.TemporaryDirectory(prefix="cumulo-ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                stacks = Path(folder, str(rank))
                call = pickle.dumps((function, arguments))
                process = context.Process(
                    target=_serve,
                    args=(theirs, store.port, stacks, rank, world, limit_s, threads, call),
                    daemon=True,
                )
                process.start()
                theirs.close()
                ranks.append(_Rank(process, ours, stacks))
            return _collect(ranks, timeout_s, heard)
        finally:
            for started in ranks:
                started.pipe.close()
                started.process.kill()
            for started in ranks:
                started.process.join(5)


@dataclass(eq=False)
class _Rank:
    process: BaseProcess
    pipe: Connection
    stacks: Path  # where it writes its stacks when told to

    def stack_text(self) -> str:
        """Where all its threads stand now."""
        if self.process.pid is None or not self.process.is_alive():
            return f"(gone, exit code {self.process.exitcode})"
        if not self.stacks.exists():
            return "(it has not begun)"
        before = self.stacks.stat().st_size
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and self.stacks.stat().st_size == before:
            time.sleep(0.02)
        time.sleep(0.05)
        return self.stacks.read_bytes()[before:].decode(errors="replace")


def _collect(ranks: Sequence[_Rank], timeout_s: float | None, heard: Callable[[Any], None]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    waiting = dict(enumerate(ranks))
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        ready = wait([one.pipe for one in waiting.values()], None if left_s == float("inf") else left_s)
        for rank, one in list(waiting.items()):
            if one.pipe not in ready:
                continue
            try:
                kind, value = pickle.loads(one.pipe.recv_bytes())
            except (EOFError, ConnectionError):
                one.process.join(2)
                kind, value = "failed", f"died, exit code {one.process.exitcode}"
            if kind == "told":
                heard(value)
                continue
            del waiting[rank]
            if kind == "done":
                results[rank] = value
            else:
                failures[rank] = f"rank {rank}: {value}"
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    why = "still waiting when another rank had failed" if failures else f"not done after {timeout_s} s"
    for rank, one in waiting.items():
        failures[rank] = f"rank {rank}: {why}; it stood at\n{one.stack_text()}"
    if failures:
        # A lost connection is what others see of a rank's failure: causes first.
        raise RanksFailed("\n".join(sorted(failures.values(), key=lambda text: "by peer" in text)))
    return [results[rank] for rank in range(len(ranks))]


_starter: Connection | None = None


def tell_starter(message: Any) -> None:
    """From a rank of `run_ranks` to who called it, while the rank runs."""
    if _starter is not None:
        _starter.send_bytes(pickle.dumps(("told", message)))


def _serve(
    pipe: Connection,
    port: int,
    stacks: Path,
    rank: int,
    world: int,
    timeout_s: float,
    threads: int,
    call: bytes,
) -> None:
    """A process of `run_ranks`: one rank of one case."""
    global _starter
    _starter = pipe
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    # Kept open for as long as the process lives: that is where stacks go.
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    try:
        function, arguments = pickle.loads(call)
        store = TCPStore("127.0.0.1", port, is_master=False)
        with join_ranks(rank, world, timedelta(seconds=timeout_s), store=store):
            answer = pickle.dumps(("done", function(rank, *arguments)))
    except BaseException:
        answer = pickle.dumps(("failed", traceback.format_exc()))
    sys.stdout.flush()
    pipe.send_bytes(answer)
    pipe.close()
