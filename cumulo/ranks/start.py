"""Starting and ending ranks: how a process joins the others, and how functions are run as ranks on this machine.

    results = run_ranks(function, 4, arguments)     # function(rank, *arguments) in 4 processes: a list of 4 results

Layout verification, benchmarks and tests call `run_ranks`; an engine over several ranks keeps its `RankProcesses`
for as long as it lives; training starts a command with `launch.py`, whose ranks join here, too. `function` is a
module's own (it travels by name). Processes are forked from one that has imported torch, and end with their case:
gloo's threads of groups that are still referred to would stay, and spin. A rank that raises, dies or hangs ends its
case with a `RanksFailed` that says which rank, why and where the others stood.
"""

import contextlib
import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from cumulo.errors import RanksFailed

_GRACE_S = 3.0  # after one rank has failed, the others have this long to see it themselves
_COLLECTIVE_S = 300.0  # how long a collective may take where the whole case has no limit


@contextmanager
def join_ranks(
    rank: int, world: int, timeout: timedelta, *, gpu: bool = False, store: TCPStore | None = None
) -> Iterator[None]:
    """This process is a rank, until it ends; one that fails leaves the others to the end of its process. `store`:
    where they meet; None: where torchrun's environment says."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", rank=rank, world_size=world, timeout=timeout, store=store
    )
    # Nobody leaves before all have come: gloo fails where another rank is gone while this one still connects.
    dist.all_reduce(torch.zeros(1))
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
    timeout_s: float | None = 300,
    threads: int = 1,
    heard: Callable[[Any], None] = lambda message: None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """The results of `function(rank, *arguments)` by rank, in `world` processes over gloo.

    `heard` is given what a rank tells with `tell_starter`. `preload`: modules that the processes are forked with;
    only the first call's count.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit_s = _COLLECTIVE_S if timeout_s is None else timeout_s
    # The optimizer's first step imports the last one.
    modules = (*(preload or (function.__module__,)), "torch._dynamo")
    case = (store.port, world, limit_s, function, arguments)
    in_program = function.__module__ == "__main__"
    started = RankProcesses(
        _join_and_run, range(world), case, threads=threads, preload=modules, import_program=in_program
    )
    try:
        return started.collect(timeout_s, heard)
    finally:
        started.end()


def _join_and_run(
    rank: int,
    port: int,
    world: int,
    timeout_s: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    store = TCPStore("127.0.0.1", port, is_master=False)
    with join_ranks(rank, world, timedelta(seconds=timeout_s), store=store):
        return function(rank, *arguments)


class RankProcesses:
    """Ranks as processes of this machine. They end with `end`, or with the process that started them: their pipe
    to it closes then, and what they wait for fails."""

    def __init__(
        self,
        function: Callable[..., Any],
        ranks: Iterable[int],
        arguments: tuple[Any, ...],
        *,
        threads: int = 1,
        preload: Sequence[str] = (),
        import_program: bool = False,
    ) -> None:
        """`import_program`: the function, or one it is given, is of the program that runs, not of a module."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *preload])
        self._folder = tempfile.TemporaryDirectory(prefix="cumulo-ranks-")
        self._ranks: dict[int, _Rank] = {}
        self._ended: dict[int, str] = {}  # ranks that have failed or died, and how
        self._results: dict[int, Any] = {}  # of ranks that have ended well
        try:
            for rank in ranks:
                ours, theirs = context.Pipe()
                stacks = Path(self._folder.name, str(rank))
                call = pickle.dumps((function, arguments))
                process = context.Process(
                    target=_serve, args=(theirs, stacks, rank, threads, call), daemon=True
                )
                with contextlib.nullcontext() if import_program else _hidden_program():
                    process.start()
                theirs.close()
                self._ranks[rank] = _Rank(process, ours, stacks)
        except BaseException:
            self.end()
            raise

    def adopt(self, rank: int, pipe: Connection) -> None:
        """A rank that was started elsewhere and has come by this connection (`remote`)."""
        self._ranks[rank] = _Rank(_RemoteProcess(pipe.fileno()), pipe, Path(self._folder.name, str(rank)))

    @property
    def pipes(self) -> dict[int, Connection]:
        """To each rank: whatever is sent here, a rank reads from `starter`."""
        return {rank: one.pipe for rank, one in self._ranks.items()}

    @property
    def sentinels(self) -> list[int]:
        """Something to wait for with multiprocessing's `wait`: ready when a rank has ended."""
        return [one.process.sentinel for one in self._ranks.values()]

    @property
    def pids(self) -> dict[int, int]:
        return {rank: one.process.pid or 0 for rank, one in self._ranks.items()}

    def collect(
        self, timeout_s: float | None, heard: Callable[[Any], None] = lambda message: None
    ) -> list[Any]:
        """All ranks' results, in their order, or RanksFailed."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        late = False
        while not late and len(self._results) + len(self._ended) < len(self._ranks):
            left_s, failed = deadline - time.monotonic(), len(self._ended)
            # Late, what has come is heard all the same: on a busy machine it was our turn only now.
            late = left_s <= 0
            wait_s = None if left_s == math.inf else max(0.0, left_s)
            self._listen(wait_s, lambda rank, told: heard(told), collects=True)
            if len(self._ended) > failed:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        why = "still waiting when another rank had failed" if self._ended else f"not done after {timeout_s} s"
        for rank, one in self._ranks.items():
            if rank not in self._ended and rank not in self._results:
                self._ended[rank] = f"rank {rank}: {why}; it stood at\n{one.stack_text()}"
        if self._ended:
            raise RanksFailed("\n".join(sorted(self._ended.values(), key=_is_aftermath)))
        return [self._results[rank] for rank in self._ranks]

    def wait_for(self, message: Any) -> None:
        """Until every rank has told `message`, or one has failed: then RanksFailed."""
        waiting = set(self._ranks)
        while waiting:
            self._listen_well(lambda rank, told: waiting.discard(rank) if told == message else None)

    def answers(self) -> dict[int, Any]:
        """What every rank tells next; RanksFailed if one has failed instead."""
        found: dict[int, Any] = {}
        while len(found) < len(self._ranks):
            self._listen_well(found.setdefault)
        return found

    def _listen_well(self, told: Callable[[int, Any], object]) -> None:
        """Until a rank tells something, or has failed: then RanksFailed."""
        if not self._ended:
            self._listen(None, told)
        if self._ended:
            raise RanksFailed("\n".join(self.failures(_GRACE_S)))

    def go_on(self) -> None:
        """To every rank that has asked (`ask_starter`). One that is gone by now is told of by the next call."""
        for pipe in self.pipes.values():
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")

    def failures(self, wait_s: float) -> list[str]:
        """Ranks that have failed or died, causes first; waits so long for the first one."""
        deadline = time.monotonic() + wait_s
        while not self._ended and (left_s := deadline - time.monotonic()) > 0:
            self._listen(left_s)
        self._listen(0)
        return sorted(self._ended.values(), key=_is_aftermath)

    def stack_text(self, rank: int) -> str:
        """Where all threads of a rank stand now."""
        return self._ranks[rank].stack_text()

    def _listen(
        self,
        wait_s: float | None,
        told: Callable[[int, Any], object] = lambda rank, message: None,
        collects: bool = False,
    ) -> None:
        """`collects`: ranks end with a result; otherwise they are to wait until they are told to end."""
        past = self._ended.keys() | self._results.keys()
        pipes = {one.pipe: rank for rank, one in self._ranks.items() if rank not in past}
        for ready in wait(list(pipes), wait_s) if pipes else ():
            assert isinstance(ready, Connection)
            rank = pipes[ready]
            kind, value = self._ranks[rank].hear()
            if kind == "told":
                told(rank, value)
            elif kind == "failed":
                self._ended[rank] = f"rank {rank}: {value}"
            elif collects:
                self._results[rank] = value
            else:
                self._ended[rank] = f"rank {rank}: ended before it was told to"

    def end(self, grace_s: float = 0.0) -> None:
        """Ranks that wait for their starter have so long to end by themselves, and are killed then."""
        for one in self._ranks.values():
            one.pipe.close()
        deadline = time.monotonic() + grace_s
        for one in self._ranks.values():
            one.process.join(max(0.0, deadline - time.monotonic()))
            one.process.kill()
        for one in self._ranks.values():
            one.process.join(5)
        self._folder.cleanup()


@contextmanager
def _hidden_program() -> Iterator[None]:
    """Processes that are started do not import the program that runs: one that makes an engine at its top level, as
    a short script does, would start ranks in every rank."""
    program: dict[str, Any] = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {name: program.pop(name) for name in ("__spec__", "__file__") if name in program}
    program["__spec__"] = None
    try:
        yield
    finally:
        program.update(hidden)


@dataclass(eq=False)
class _RemoteProcess:
    """A process of another host, as far as it concerns this one: it ends when its connection does."""

    sentinel: int
    pid: int | None = None
    exitcode: str = "unknown: it ran on another host"

    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...

    def is_alive(self) -> bool:
        return False


@dataclass(eq=False)
class _Rank:
    process: BaseProcess | _RemoteProcess
    pipe: Connection
    stacks: Path  # where it writes its stacks when told to

    def hear(self) -> tuple[str, Any]:
        """What it says next: ("told", message), ("done", result) or ("failed", why)."""
        try:
            kind, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):  # also of a host that does not answer any more
            self.process.join(2)
            return "failed", f"died, exit code {self.process.exitcode}"
        return kind, value

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


def _is_aftermath(text: str) -> bool:
    """A lost connection is what others see of a rank's failure."""
    return "by peer" in text or "Broken pipe" in text


_starter: Connection | None = None


def starter() -> Connection:
    """In a rank: the pipe to the process that started it."""
    if _starter is None:
        raise RanksFailed("this process is no rank that RankProcesses started")
    return _starter


def ask_starter(message: Any) -> None:
    """From a rank to who started it, as `tell_starter`; returns when that one says `go_on`."""
    tell_starter(message)
    starter().recv_bytes()


def tell_starter(message: Any) -> None:
    """From a rank to who started it, while the rank runs."""
    if _starter is not None:
        _starter.send_bytes(pickle.dumps(("told", message)))


def _serve(pipe: Connection, stacks: Path, rank: int, threads: int, call: bytes) -> None:
    """A process of `RankProcesses`: one rank of one case."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Kept open for as long as the process lives: that is where stacks go.
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    function, arguments = pickle.loads(call)
    be_rank(pipe, function, rank, arguments, threads)


def be_rank(
    pipe: Connection, function: Callable[..., Any], rank: int, arguments: tuple[Any, ...], threads: int
) -> None:
    """This process is a rank: it calls the function, and tells whoever holds the other end how that ended."""
    global _starter
    _starter = pipe
    torch.set_num_threads(threads)
    try:
        answer = pickle.dumps(("done", function(rank, *arguments)))
    except BaseException:
        answer = pickle.dumps(("failed", traceback.format_exc()))
    sys.stdout.flush()
    with contextlib.suppress(OSError):  # whoever started it may be gone
        pipe.send_bytes(answer)
    pipe.close()
