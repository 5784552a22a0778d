"""`cumulo check node`: whether this node is as fast and as right as it should be, and telling the scheduler."""

import json
import os
import re
import shlex
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cumulo.base.nearest import did_you_mean
from cumulo.base.report import Row
from cumulo.cli.launch import StoreOption
from cumulo.cli.shared import options
from cumulo.cli.shared.declare import flag, option, takes_options
from cumulo.cli.shared.terminal import note, read_stdin, read_text, show_report, working
from cumulo.errors import ConfigError

if TYPE_CHECKING:
    from cumulo.cluster.decide.health import NodeCheck
    from cumulo.cluster.node_health import NodeHealth
    from cumulo.diagnose.diagnosis import NodeAct

app = typer.Typer()
EXAMPLE = "Example: [bold]cumulo check node --quick --json node.json[/bold]"
_SCHEDULERS = ("local", "slurm", "kubernetes")


@dataclass(frozen=True, kw_only=True)
class NodeCheckOptions:
    quick: bool = flag("Take seconds: measure for a shorter time, and leave out the all-reduce.")
    against: list[Path] = option(
        "Report (--json) of another node's check to compare with; may be repeated.", ()
    )
    log: Path | None = option(
        "Log of this node to look for faults in; '-': stdin. Default: the kernel's.", None
    )
    node: str = option("Name of this node in the scheduler. Default: Slurm's name for it, or the host's.", "")
    cordon: bool = flag("Cordon or drain the node if it is unhealthy: no job of the store starts on it then.")
    uncordon: bool = flag(
        "Bring the node back if it passes. What its log had before the cordon does not count."
    )
    on: str = option("Scheduler to tell, too: slurm is told, for kubernetes the command is printed.", "local")
    exit_code: int = option("Exit code for a node to cordon; else it is 1 for one that is slow.", 1, min=1)
    store: StoreOption = None
    json_file: options.JsonOption = None


@app.callback()
def checks() -> None:
    """Check what jobs run on."""


@app.command(epilog=EXAMPLE)
@takes_options
def node(chosen: NodeCheckOptions) -> None:
    """Check this node: memory bandwidth, a matrix product, an all-reduce with a neighbour, and its log.

    Rates are compared with the planner's catalogue (GPUs, without --quick), else with other nodes of the same kind,
    else with earlier checks of this node; less than 0.8 of that is slow. Nodes on which torchrun starts it are each
    other's neighbours, and the first one reports. The exit code is 1 if a node is unhealthy.
    """
    from cumulo.bench.node_check import among_nodes, check_node
    from cumulo.cluster.decide.health import check_signals, compared
    from cumulo.cluster.job_store import JobStore, default_store
    from cumulo.cluster.node_health import NodeHealth, NodeState, log_signals

    if chosen.on not in _SCHEDULERS:
        raise ConfigError(f"--on cannot be {chosen.on}{did_you_mean(chosen.on, _SCHEDULERS)}")
    name = chosen.node or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    health = NodeHealth(JobStore(chosen.store or default_store()))
    state, known = health.states().get(name, NodeState(name)), health.checks()
    known += [one for path in chosen.against for one in _checks_in(path)]
    published = not (chosen.quick or chosen.against)

    def slow(one: "NodeCheck") -> bool:
        return not all(row.ok for row in compared(one, known))

    with working(f"checking {name}") as tell:
        found = [check_node(name, chosen.quick, published, slow, tell)]
        if "RANK" in os.environ:
            tell("all-reduce with its neighbours")
            if not (found := among_nodes(found[0])):
                return  # the first rank reports
    rows, signals = list[Row](), []
    for one in found:
        rates = compared(one, [*known, *(other for other in found if other is not one)])
        bad = check_signals(one, rates, time.time())
        rows += [Row("node", one.node), *rates] if len(found) > 1 else rates
        rows += [Row(text, False, must=True) for text in one.wrong]
        signals += bad
        if not bad and not one.disturbed:
            health.add_passed(one)
    text = _log(chosen.log, state.since_s if chosen.uncordon else state.back_s)
    logged = [] if text is None else log_signals(name, text, time.time())
    signals += logged
    told = "this user cannot read the kernel's log" if text is None else "; ".join(one.text for one in logged)
    rows.append(Row("no fault in the log", not logged or logged[0].asks == "watch", must=True, note=told))
    checks = [{"node": one.node, "device": one.device, "rates": one.rates} for one in found]
    show_report(f"{name}: {found[0].device}", rows, chosen.json_file, checks=checks)
    bad = [one for one in signals if one.asks != "watch"]
    for signal in bad if chosen.cordon else ():
        act, reason = health.tell(signal)
        note(f"{signal.node}: {act}: {reason}")
        _tell(health, chosen.on, signal.node, act, reason)
    if chosen.uncordon and any(one.disturbed for one in found):
        note(f"{name} stays as it is: check it again when it is idle")
    elif chosen.uncordon and state.closed and all(row.ok for row in rows):
        health.bring_back(name, "it passed its check")
        note(f"{name} is back: it passed its check")
        _tell(health, chosen.on, name, "ignore")
    if not all(row.ok for row in rows):
        raise typer.Exit(chosen.exit_code if bad else 1)


def _checks_in(path: Path) -> "list[NodeCheck]":
    from cumulo.cluster.decide.health import NodeCheck

    try:
        found = json.loads(read_text(path))["checks"]
        return [NodeCheck(one["node"], one["device"], one["rates"]) for one in found]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is no report of `cumulo check node --json`") from None


def _log(path: Path | None, since_s: float) -> str | None:
    """The log that was named, or the kernel's messages since then; None: they cannot be read."""
    if path is not None:
        return read_stdin() if str(path) == "-" else read_text(path)
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", check=True)
        booted_s = time.time() - float(Path("/proc/uptime").read_text("utf-8").split()[0])
    except (OSError, subprocess.CalledProcessError):
        return None
    lines = re.findall(r"^\[ *(\d+\.\d+)\] (.*)", done.stdout, re.M)
    return "\n".join(text for stamp, text in lines if booted_s + float(stamp) > since_s)


def _tell(health: "NodeHealth", scheduler: str, name: str, act: "NodeAct", reason: str = "") -> None:
    for words in health.commands(scheduler, name, act, reason):
        line = shlex.join(words)
        if scheduler == "kubernetes":
            note(f"run: {line}")
            continue
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            refused = done.returncode and (done.stderr.strip() or f"exit code {done.returncode}")
        except OSError as error:
            refused = f"{words[0]}: {error.strerror}"
        note(
            f"Slurm refused it ({refused}); an operator runs: {line}"
            if refused
            else f"Slurm was told: {line}"
        )
