"""NodeHealth: what was heard of each node and what became of it, next to the jobs of a store. The one door for
signals: checks, `cumulo diagnose`, and attempts that ended badly come here, and the snapshots of policies ask it.

    health = NodeHealth(store)
    health.tell(HealthSignal("n3", "log", "Xid 79: ...", time.time(), "drain"))
    health.seen(nodes)          # in which n3 is draining
"""

import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from cumulo.cluster.decide.health import ACTS, WATCHED_S, HealthSignal, NodeCheck, judged
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.recovery import REFUSED, UNHEALTHY, AttemptEnd
from cumulo.cluster.drivers.command import output_file, output_tail
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.diagnose.diagnose import diagnose
from cumulo.diagnose.diagnosis import NodeAct

_HELD_UP = re.compile(r"has taken more than .* s: ranks? (\d+(?:, \d+)*) held it up")
_PROGRAMS_OWN = (
    "program-fault",
    "gpu-out-of-memory",
    "mismatched-calls",
    "version-mismatch",
    "no-connection",
)
_CLOSED: dict[NodeAct, Literal["cordoned", "draining"]] = {"cordon": "cordoned", "drain": "draining"}


def host_of(node: str) -> str:
    """Jobs of this machine call it `here`."""
    return socket.gethostname() if node == "here" else node


@dataclass(frozen=True, slots=True)
class NodeState:
    node: str
    act: NodeAct = "ignore"  # the most severe since it was last brought back
    since_s: float = 0.0
    reason: str = ""
    kind: str = ""  # of the signal
    back: str = ""  # what brought it back the last time
    back_s: float = 0.0

    @property
    def closed(self) -> bool:
        return self.act in _CLOSED

    @property
    def shown(self) -> str:
        return _CLOSED.get(self.act) or ("watched" if self.act == "watch" else "ready")


class NodeHealth:
    def __init__(self, store: JobStore) -> None:
        self.store, self.path = store, store.folder / "nodes.jsonl"

    def states(self) -> dict[str, NodeState]:
        found: dict[str, NodeState] = {}
        for event in self._events():
            name, before = event["node"], found.get(event["node"], NodeState(event["node"]))
            if event["event"] == "back":
                found[name] = NodeState(name, back=event["text"], back_s=event["time_s"])
            elif event["event"] == "signal" and ACTS.index(event["act"]) > ACTS.index(before.act):
                facts = {one: event[one] for one in ("act", "reason", "kind")}
                found[name] = replace(before, since_s=event["time_s"], **facts)
        return found

    def seen(self, nodes: Sequence[ClusterNode]) -> tuple[ClusterNode, ...]:
        """The nodes as policies see them: closed where they are cordoned or drained."""
        closed = {name: _CLOSED[one.act] for name, one in self.states().items() if one.closed}
        healths = [(node, closed.get(host_of(node.name))) for node in nodes]
        return tuple(
            replace(node, health=health) if health and node.health == "ready" else node
            for node, health in healths
        )

    def tell(self, signal: HealthSignal) -> tuple[NodeAct, str]:
        """What the rule decides, and why; both are written down."""
        with self.store.locked():
            act, reason = judged(signal, self._heard(), self._ran(signal.time_s))
            self._add("signal", **asdict(signal), act=act, reason=reason)
        return act, reason

    def bring_back(self, node: str, why: str) -> None:
        with self.store.locked():
            self._add("back", node=node, text=why, time_s=round(time.time(), 3))

    def checks(self) -> list[NodeCheck]:
        """Those that nodes have passed, the oldest first."""
        events = [one for one in self._events() if one["event"] == "passed"]
        return [NodeCheck(one["node"], one["device"], one["rates"]) for one in events]

    def add_passed(self, check: NodeCheck) -> None:
        facts = {"node": check.node, "device": check.device, "rates": check.rates}
        with self.store.locked():
            self._add("passed", **facts, time_s=round(time.time(), 3))

    def commands(self, scheduler: str, node: str, act: NodeAct, reason: str = "") -> list[list[str]]:
        """With which another scheduler closes a node, or with `ignore` opens it. Slurm lets jobs of a drained node
        run on: those of the store are asked to save, and queue themselves again."""
        if scheduler == "kubernetes":
            verbs = {
                "cordon": ["cordon"],
                "drain": ["drain", "--ignore-daemonsets", "--delete-emptydir-data"],
            }
            return [["kubectl", *verbs.get(act, ["uncordon"]), node]]
        if scheduler != "slurm":
            return []
        state = ["State=DRAIN", f"Reason={reason[:200]}"] if act in _CLOSED else ["State=RESUME"]
        there = [
            one.handle
            for one in self.store.jobs().values()
            if act == "drain" and one.target == "slurm" and node in {place.node for place in one.places}
        ]
        update = ["scontrol", "update", f"NodeName={node}", *state]
        return [update, *(["scancel", "--signal=TERM", handle] for handle in there)]

    def _heard(self) -> list[HealthSignal]:
        heard: list[HealthSignal] = []
        for event in self._events():
            if event["event"] == "back":
                heard = [one for one in heard if one.node != event["node"]]
            elif event["event"] == "signal":
                heard.append(HealthSignal(**{name: event[name] for name in HealthSignal.__slots__}))
        return heard

    def _ran(self, now_s: float) -> Counter[str]:
        """How many jobs each node had within a day."""
        found = Counter[str]()
        for record in self.store.jobs().values():
            lately = [one for one in record.phases if one.end_s is None or now_s - one.end_s < WATCHED_S]
            found.update({host_of(place.node) for phase in lately for place in phase.places})
        return found

    def _events(self) -> Iterator[dict[str, Any]]:
        """A line that a crash cut short does not count."""
        text = self.path.read_text("utf-8", "replace") if self.path.exists() else ""
        for line in text.splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def _add(self, event: str, **facts: Any) -> None:
        """On a line of its own, whatever a crash left behind."""
        with self.path.open("ab") as stream:
            stream.write(f"\n{json.dumps({'event': event, **facts})}\n".encode())
            stream.flush()
            os.fsync(stream.fileno())


def log_signals(node: str, text: str, now_s: float) -> list[HealthSignal]:
    """The most severe of what a log says of the node that wrote it, if anything."""
    found = diagnose(text)
    said = f"{found.sentence} ({'; '.join(found.evidence[:1])})"
    return [] if found.node == "ignore" else [HealthSignal(node, "log", said, now_s, found.node)]


def end_signals(
    record: JobRecord, ranks: Sequence[str], end: AttemptEnd, began: Sequence[str] = ()
) -> list[HealthSignal]:
    """What an attempt that ended badly says of its nodes. `ranks`: the node of each rank; `began`: nodes on which
    ranks failed first, where that is known. Where it is not, a failure counts for the only node, or for none."""
    now_s, job = time.time(), record.job_id
    hosts = [host_of(node) for node in ranks]
    if held := _HELD_UP.search(end.error):
        late = {hosts[rank] for rank in map(int, held[1].split(", ")) if rank < len(hosts)}
        return [HealthSignal(late.pop(), "hang", end.error[:200], now_s, job=job)] if len(late) == 1 else []
    bad = {host_of(node) for node in began or hosts}
    if len(bad) != 1 or end.exit_code in (0, REFUSED, UNHEALTHY) or end.step <= end.first_step:
        return []
    node, tail = bad.pop(), output_tail(output_file(record)).rpartition("--- attempt ")[2]
    if {*hosts} == {node} and (logged := log_signals(node, tail, now_s)):
        return logged
    how = "was killed" if end.exit_code is None else f"ended with exit code {end.exit_code}"
    said = f"{job} {how} after step {end.step}: {end.error[:160] or 'its log says why'}"
    by_program = diagnose(tail).cause in _PROGRAMS_OWN
    return [] if by_program else [HealthSignal(node, "failure", said, now_s, job=job)]
