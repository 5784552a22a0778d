"""The decision log: every snapshot that a live policy saw, with what it decided. Appended by the drivers' players;
`replay` asks the policies again and names every decision that would be another one today."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cumulo.base.strict import build
from cumulo.cluster.decide.decisions import Decision, plain
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.snapshot import Policy, Snapshot, TenantQuota, snapshot_of

_GONE = ("nvlink_domain",)


class DecisionLog:
    """Written by one process at a time. Turns in which nothing is new are left out."""

    def __init__(self, path: Path) -> None:
        self.path, self._last = path, ""

    def add(self, policy: str, snapshot: Snapshot, decided: Iterable[Decision]) -> None:
        turn: dict[str, Any] = {
            "policy": policy,
            "snapshot": plain_snapshot(snapshot),
            "decisions": plain_decisions(decided),
        }
        unchanged = json.dumps({**turn, "snapshot": {**turn["snapshot"], "now_s": 0}})
        if unchanged != self._last:
            self._last = unchanged
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(turn) + "\n")


def replay(path: Path, policy: Callable[[str], Policy]) -> tuple[int, list[str]]:
    """Returns how many turns were replayed, and which decisions differ now."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    differing = []
    for number, line in enumerate(lines, 1):
        turn = json.loads(line)
        again = plain_decisions(policy(turn["policy"])(read_snapshot(turn["snapshot"])))
        if again != turn["decisions"]:
            differing.append(f"turn {number}: decided {turn['decisions']}, and now {again}")
    return len(lines), differing


def plain_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "now_s": snapshot.now_s,
        "nodes": [dataclasses.asdict(node) for node in snapshot.nodes],
        "waiting": [dataclasses.asdict(job) for job in snapshot.waiting],
        "running": [dataclasses.asdict(job) for job in snapshot.running.values()],
        "quotas": [dataclasses.asdict(quota) for quota in snapshot.quotas.values()],
    }


def read_snapshot(content: Mapping[str, Any]) -> Snapshot:
    def all_of(kind: type, name: str) -> list[Any]:
        return [build(kind, _now(one), f"{name} of the decision log") for one in content[name]]

    return snapshot_of(
        content["now_s"],
        all_of(ClusterNode, "nodes"),
        all_of(JobRequest, "waiting"),
        all_of(RunningJob, "running"),
        all_of(TenantQuota, "quotas"),
    )


def _now(one: Mapping[str, Any]) -> dict[str, Any]:
    """Without the fields of earlier versions, which no policy read."""
    return {name: value for name, value in one.items() if name not in _GONE}


def plain_decisions(decided: Iterable[Decision]) -> list[dict[str, Any]]:
    """Decisions as JSON has them: lists, not tuples."""
    found = [plain(one) for one in decided]
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]
