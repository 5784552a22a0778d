"""LocalDriver: jobs as processes on this machine, placed by the same policies as on a cluster. What it is asked
goes into the store; a supervisor process, which outlives the command, carries it out (`local_supervisor.py`)."""

import contextlib
import fcntl
import os
import shlex
import socket
import subprocess
import sys

from cumulo.base.machine import gpus_here
from cumulo.base.report import available_cores
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.drivers.command import ranks_command
from cumulo.cluster.drivers.driver import Facts
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.cluster.queue_settings import queue_settings
from cumulo.errors import ConfigError


def this_machine(store: JobStore) -> tuple[ClusterNode, ...]:
    slots = queue_settings(store, "local").slots
    return (ClusterNode("here", gpus=len(gpus_here()), cpu_milli=1000 * (slots or available_cores())),)


WAKE, LOCK = "supervisor.sock", "supervisor.lock"


class LocalDriver:
    def __init__(self, store: JobStore) -> None:
        self.store = store

    def explain(self, record: JobRecord) -> str:
        refuse_if_never(record, self.store)
        command = ranks_command(record, record.job.ranks)
        node, group = this_machine(self.store)[0], record.job.devices[0]
        present = f"{node.cpu_milli // 1000} cores" if group.on_cpu else f"{node.gpus} GPUs"
        return f"# {record.job.ranks} of the {present} of this machine\n{shlex.join(command)}"

    def submit(self, record: JobRecord) -> Facts:
        refuse_if_never(record, self.store)
        self._wake()
        return {"handle": record.job_id, "state": "queued", "reason": "waits for the supervisor"}

    def look(self, record: JobRecord) -> Facts:
        """The supervisor writes down what happens; if it died, another one takes its place."""
        if not record.ended:
            self._wake()
        return {}

    def cancel(self, record: JobRecord) -> Facts:
        self._wake()
        return {}

    def _wake(self) -> None:
        """Tell the supervisor to look, or start one. It ends when nothing is left to do, and decides so under the
        store's lock: whoever has written before is seen."""
        if not supervised(self.store):
            with (self.store.folder / "supervisor.log").open("ab") as log:
                subprocess.Popen(
                    [sys.executable, "-m", "cumulo.cluster.drivers.local_supervisor", str(self.store.folder)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
            line.setblocking(False)
            line.sendto(b"!", str(self.store.folder / WAKE))


def supervised(store: JobStore) -> bool:
    """Whether a supervisor runs."""
    with (store.folder / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def refuse_if_never(record: JobRecord, store: JobStore) -> None:
    """A gang that this machine could not hold if it were empty would wait for ever."""
    if not hasattr(os, "pidfd_open"):
        raise ConfigError(
            "jobs on this machine need Linux: run `cumulo train` or `cumulo serve` itself, or launch it elsewhere"
        )
    node = this_machine(store)[0]
    request = record.job.request(record.job_id, 0.0)
    if request.gpus_per_task == 0:
        wanted, present, unit = request.tasks * request.cpu_milli // 1000, node.cpu_milli // 1000, "cores"
    else:
        wanted, present, unit = request.tasks * request.gpus_per_task, node.gpus, "GPUs"
    if wanted > present:
        raise ConfigError(
            f"{record.job.name} asks for {wanted} {unit}, and this machine has {present}: ask for fewer, raise the "
            "slots with --slots, or launch it --on ray or --on slurm"
        )
    if request.devices and node.device not in request.devices:
        raise ConfigError(f"{record.job.name} asks for {' or '.join(request.devices)}, and this machine has "
                          f"{node.device or 'no GPU'}: write kind: gpu or kind: cpu")  # fmt: skip
