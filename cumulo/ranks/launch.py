"""Start a command as ranks on this machine with torchrun's agent, and start them again when one dies. Called by
`cumulo train`; several machines are started by a `torchrun` on each, with the same command behind it.

    launch([sys.executable, "-m", "cumulo", "train", "--folder", "runs/mine", "--resume"], processes=4, ...)

The command must resume from the freshest checkpoint: it is the same at every start.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cumulo.errors import ConfigError, TrainingError
from cumulo.layout.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

REFUSED = 2  # exit code of a rank whose run cannot go on, whoever starts it again
LOST = 3  # of a rank that has lost another
HUNG = 4  # of a rank that has waited for too long
STARTER = "CUMULO_RANKS_OF"  # the process id of whoever starts a rank: torchrun's agent, Slurm's or Ray's
_AGENT_PATIENCE_S = 30  # torch's agent gives ranks so long between SIGTERM and SIGKILL
_STOP_S = 600  # after Ctrl-C: for the step, the checkpoint and the export


def under_torchrun() -> bool:
    """Whether this process is one rank of several."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))


def end_with_starter() -> None:
    """However the process ends that started this rank, also by SIGKILL: this one ends, too."""
    starter = int(os.environ.get(STARTER, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != starter and STARTER in os.environ:
            os._exit(LOST)  # it was gone before
        return

    def watch() -> None:
        while os.getppid() == starter:
            time.sleep(0.5)
        os._exit(LOST)

    threading.Thread(target=watch, name="end-with-starter", daemon=True).start()


def local_ranks() -> int:
    """Ranks on this machine, this one included."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_machine(layout: Layout, device: str) -> None:
    """Refuse a layout that this machine alone cannot run."""
    import torch

    wanted = layout.world
    if device == "cpu" or not torch.cuda.is_available():
        return
    if (found := torch.cuda.device_count()) < wanted:
        raise ConfigError(
            f"layout {layout} has {wanted} ranks, each on a GPU of its own, and this machine has {found}; "
            "start it with torchrun on more machines, change the layout, or set device: cpu"
        )


def launch(command: Sequence[str], processes: int, most_restarts: int, tell: Callable[[str], None]) -> bool:
    """Run `command` as `processes` ranks until all have ended well. Ctrl-C is passed on, and waited for; then it
    returns False, because nobody knows what the ranks still did."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("agent.server.api", "multiprocessing.api"):  # what matters of it is told here
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    restarts = 0
    while True:
        try:
            _run_agent(command, processes)
            return True
        except SignalException:
            return False
        except ChildFailedError as error:
            rank, failure = _cause(error)
            why = f"rank {rank} {_end_of(failure.exitcode)}"
            if failure.exitcode == HUNG:
                why = failure.message
            if failure.exitcode == REFUSED:
                raise TrainingError(failure.message) from None
            if restarts == most_restarts:
                raise TrainingError(
                    f"{why}, after {restarts} restarts already; look at what it wrote above, or raise "
                    "faults.most_restarts"
                ) from None
            restarts += 1
            now = datetime.now(UTC).strftime("%H:%M:%S")
            tell(f"{now} {why}; restarting all {processes} processes ({restarts} of {most_restarts})")


def _cause(error: "ChildFailedError") -> "tuple[int, ProcessFailure]":
    """Who began it. A rank that is killed pulls the others down, and may be found after those that lost it; whom
    the agent kills itself, because it does not end, is found later still."""
    failures = list(error.failures.items())
    first = error.get_first_failure()
    for rank, failure in failures:
        if failure.exitcode == REFUSED:
            return rank, failure
    if first[1].exitcode not in (LOST, -signal.SIGTERM):
        return first
    soon = first[1].timestamp + _AGENT_PATIENCE_S
    others = [item for item in failures if item[1].exitcode not in (LOST, -signal.SIGTERM)]
    return next((item for item in others if item[1].timestamp < soon), first)


def _run_agent(command: Sequence[str], processes: int) -> None:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # It names events that nobody records by reading the source of the whole stack, for seconds at every start.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    with tempfile.TemporaryDirectory(prefix="cumulo-ranks-") as folder:
        # One agent per start: its store is new, so that nobody meets the keys of ranks that are dead.
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            shutdown_timeout=_STOP_S,
        )
        os.environ[STARTER] = str(os.getpid())
        try:
            elastic_launch(config, command[0])(*command[1:])
        finally:
            del os.environ[STARTER]


def report_refusal(error: Exception) -> None:
    """Tell whoever launched this rank why its run cannot go on."""
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        content = {"message": str(error), "timestamp": int(time.time())}  # as torchrun's agent reads it
        Path(file).write_text(json.dumps(content), "utf-8")


def _end_of(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"
