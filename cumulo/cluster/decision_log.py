"""The decision log: every snapshot that a live policy saw, with what it decided. Appended by the drivers' players;
`replay` asks the policies again and names every decision that would be another one today."""

import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cumulo.base.strict import build
from cumulo.cluster.decide.decisions import Decision, plain
from cumulo.cluster.decide.jobs import JobRequest, RunningJob
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.snapshot import Policy, Snapshot, TenantQuota, snapshot_of

_GONE = ("nvlink_domain",)
_NUMBER = re.compile(r"\b\d+(\.\d+)?\b")


class DecisionLog:
    """Turns in which nothing but times has changed are left out."""

    def __init__(self, path: Path) -> None:
        self.path, self._last = path, ""

    def add(self, policy: str, snapshot: Snapshot, decided: Iterable[Decision]) -> None:
        turn: dict[str, Any] = {
            "policy": policy,
            "snapshot": plain_snapshot(snapshot),
            "decisions": plain_decisions(decided),
        }
        if (new := _without_times(policy, snapshot, turn["decisions"])) != self._last:
            self._last = new
            self._write(json.dumps(turn).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        """A line that a crash cut short goes, and the supervisors of several targets do not mix theirs."""
        with self.path.open("a+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            end = stream.seek(0, os.SEEK_END)
            if end and stream.seek(end - 1) is not None and stream.read(1) != b"\n":
                stream.truncate(self.path.read_bytes().rfind(b"\n") + 1)
            stream.write(line)


def _without_times(policy: str, snapshot: Snapshot, decided: Sequence[Mapping[str, Any]]) -> str:
    """What must change so that a turn is a new one: a reason that a job waits counts without its numbers."""
    waits = {one["job_id"]: _NUMBER.sub("", one["reason"]) for one in decided if one["kind"] == "Waits"}
    places = {name: one.places for name, one in snapshot.running.items()}
    acts = [one for one in decided if one["kind"] != "Waits"]
    there = policy, snapshot.nodes, list(snapshot.quotas.values()), [job.job_id for job in snapshot.waiting]
    return repr((there, places, waits, acts))


def replay(path: Path, policy: Callable[[str], Policy]) -> tuple[int, list[str]]:
    """Returns how many turns were replayed, and which decisions differ now."""
    whole, _, _ = path.read_text("utf-8").rpartition("\n") if path.exists() else ("", "", "")
    lines = whole.splitlines()
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
