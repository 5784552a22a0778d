"""This machine as a node of a cluster: its cores and GPUs are the slots that jobs are placed on."""

import json

from cumulo.base.files import write_whole
from cumulo.base.machine import gpus_here
from cumulo.base.report import available_cores
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.job_store import JobStore
from cumulo.errors import ConfigError


def this_machine(store: JobStore) -> tuple[ClusterNode, ...]:
    slots = _settings(store).get("slots")
    return (ClusterNode("here", gpus=len(gpus_here()), cpu_milli=1000 * (slots or available_cores())),)


def set_slots(store: JobStore, slots: int) -> None:
    """Cores that jobs may take together; more than there are share them."""
    if slots < 1:
        raise ConfigError(f"--slots must be 1 or more, got {slots}")
    _write(store, "slots", slots)


def policy_name(store: JobStore) -> str:
    return str(_settings(store).get("policy", "fifo"))


def set_policy(store: JobStore, name: str) -> None:
    _write(store, "policy", name)


def _settings(store: JobStore) -> dict[str, int]:
    path = store.folder / "local.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _write(store: JobStore, name: str, value: int | str) -> None:
    with store.locked():
        content = _settings(store) | {name: value}
        write_whole(store.folder / "local.json", json.dumps(content).encode())
