"""A real Slurm cluster on this machine, in a folder of its own: munged, one slurmctld and four slurmd.

with SlurmCluster(tmp_path) as slurm:       # SLURM_CONF names it, for every Slurm command
    slurm.kill_node("n3")                   # its slurmd and everything that runs under it
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import wait_for

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
needs_slurm = pytest.mark.skipif(
    any(shutil.which(name) is None for name in _PROGRAMS) or os.getuid() != 0,
    reason="needs slurm-wlm and munge, and root to start them",
)
_CONFIG = """ClusterName=tiny
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
{scheduling}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp
AccountingStorageType=accounting_storage/none
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


_QUICK = """SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,requeue_delay=0
SlurmdTimeout=5
MessageTimeout=5
"""


class SlurmCluster:
    def __init__(self, folder: Path, nodes: int = 4, gpus: int = 2, scheduling: str = _QUICK) -> None:
        """`gpus` of each node, and as many cores; `scheduling`: lines of slurm.conf."""
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, nodes + 1)]
        self._processes: dict[str, subprocess.Popen[Any]] = {}
        for name in ("state", "spool", "munge"):
            (folder / name).mkdir(parents=True)
        ports = _free_ports(1 + nodes)
        lines = "".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={gpus} "
            f"RealMemory=2000 Gres=gpu:{gpus} State=UNKNOWN\n"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        )
        config = _CONFIG.format(folder=folder, ports=ports, scheduling=scheduling)
        (folder / "slurm.conf").write_text(config + lines)
        for number in range(gpus):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(
            f"NodeName=n[1-{nodes}] Name=gpu Count={gpus} File={folder}/gpu[0-{gpus - 1}]\n"
        )
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (folder / "munge").chmod(0o700)

    def __enter__(self) -> "SlurmCluster":
        self._before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        try:
            self.start_identity()
            self.start_controller(fresh=True)
            for name in self.nodes:
                self.start_node(name)
            wait_for(
                lambda: all(self.node_state(name) == "idle" for name in self.nodes), "the nodes of Slurm"
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.nodes:
            if name in self._processes:
                self.kill_node(name)
        for name in list(self._processes):
            self._end(name)
        if self._before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = self._before

    # -- its parts ------------------------------------------------------------------------------------------
    def start_identity(self) -> None:
        munge = self.folder / "munge"
        self._start(
            "munged", "--force", "--foreground", f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        wait_for((munge / "socket").exists, "munged")

    def stop_identity(self) -> None:
        self._end("munged")

    def start_controller(self, fresh: bool = False) -> None:
        self._start("slurmctld", "-D", *(["-i", "-c"] if fresh else []))
        wait_for(lambda: _run("scontrol", "ping").find("UP") >= 0, "slurmctld")

    def stop_controller(self, number: int = signal.SIGTERM) -> None:
        self._end("slurmctld", number)

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-N", name, key=name)

    def kill_daemon(self, name: str) -> None:
        """A node's slurmd alone; what it has started runs on."""
        self._end(name, signal.SIGKILL)

    def kill_node(self, name: str) -> None:
        """As when its power fails: slurmd, its step daemons and their tasks, at once."""
        self._end(name, signal.SIGKILL)
        tasks = [pid for pid in _pids() if f"SLURMD_NODENAME={name}\0" in _text(pid, "environ")]
        parents = {_parent(pid) for pid in tasks}
        daemons = [pid for pid in parents if pid and "slurmstepd" in _text(pid, "cmdline")]
        for pid in (*daemons, *tasks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- what it says ---------------------------------------------------------------------------------------
    def node_state(self, name: str) -> str:
        return _run("sinfo", "-h", "-N", "-n", name, "-o", "%T").split("\n")[0].strip()

    def queue(self) -> dict[str, tuple[str, int]]:
        """Of every job, by name: its state and its number of allocated nodes."""
        found = {}
        for line in _run("squeue", "-h", "-t", "all", "-o", "%j|%T|%N").splitlines():
            name, state, nodes = line.split("|")
            hosts = _run("scontrol", "show", "hostnames", nodes).split() if nodes else []
            found[name] = (state, len(hosts))
        return found

    def restarts(self, job_id: str) -> int:
        shown = _run("scontrol", "show", "job", job_id, "-o")
        return int(shown.split("Restarts=")[1].split()[0]) if "Restarts=" in shown else 0

    def _start(self, program: str, *arguments: str, key: str = "") -> None:
        with (self.folder / f"{key or program}.out").open("ab") as out:
            self._processes[key or program] = subprocess.Popen([program, *arguments], stdout=out, stderr=out)

    def _end(self, name: str, number: int = signal.SIGTERM) -> None:
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _free_ports(count: int) -> list[int]:
    lines = [socket.socket() for _ in range(count)]
    try:
        for line in lines:
            line.bind(("127.0.0.1", 0))
        return [line.getsockname()[1] for line in lines]
    finally:
        for line in lines:
            line.close()


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").glob("[0-9]*"))


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text("utf-8", "replace")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    fields = _text(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0
