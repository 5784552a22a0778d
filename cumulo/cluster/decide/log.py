"""Decisions on record: a snapshot and what was decided on it, as one JSON line. Simulator and live drivers
write the same lines, and `replay` shows that a policy decides the same again.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from cumulo.cluster.decide.decisions import Cordon, Decision, Eviction, JobPlacement, Resize, Waits
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, SpeedTable, StepProfile, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.snapshot import Policy, Snapshot, TenantQuota, snapshot_of

_KINDS: dict[str, type[Decision]] = {
    "JobPlacement": JobPlacement, "Eviction": Eviction, "Resize": Resize, "Waits": Waits, "Cordon": Cordon,
}  # fmt: skip


def log_line(snapshot: Snapshot, decisions: Iterable[Decision]) -> str:
    return json.dumps(
        {
            "now_s": snapshot.now_s,
            "nodes": [asdict(node) for node in snapshot.nodes],
            "waiting": [asdict(job) for job in snapshot.waiting],
            "running": [asdict(job) for job in snapshot.running.values()],
            "quotas": [asdict(quota) for quota in snapshot.quotas.values()],
            "decisions": [{"kind": type(one).__name__} | asdict(one) for one in decisions],
        }
    )


def read_line(line: str) -> tuple[Snapshot, list[Decision]]:
    record = json.loads(line)
    snapshot = snapshot_of(
        record["now_s"],
        [ClusterNode(**node) for node in record["nodes"]],
        [_request(job) for job in record["waiting"]],
        [
            RunningJob(**(job | {"request": _request(job["request"]), "places": _places(job["places"])}))
            for job in record["running"]
        ],
        [TenantQuota(**quota) for quota in record["quotas"]],
    )
    return snapshot, [_decision(one) for one in record["decisions"]]


def replay(lines: Iterable[str], policy: Policy) -> list[str]:
    """One sentence for each recorded moment at which the policy now decides otherwise; []: it replays."""
    different = []
    for number, line in enumerate(lines, 1):
        snapshot, decisions = read_line(line)
        again = policy(snapshot)
        if again != decisions:
            different.append(f"line {number}, at {snapshot.now_s:g} s: decided {decisions}, now {again}")
    return different


def _request(fields: dict[str, Any]) -> JobRequest:
    step, speed = fields["step"], fields["speed"]
    return JobRequest(
        **(
            fields
            | {
                "devices": tuple(fields["devices"]),
                "step": None if step is None else StepProfile(**step),
                "speed": None
                if speed is None
                else SpeedTable(tuple(speed["one_node"]), tuple(speed["many_nodes"])),
            }
        )
    )


def _places(places: list[dict[str, Any]]) -> tuple[TaskPlace, ...]:
    return tuple(TaskPlace(place["node"], tuple(place["gpus"])) for place in places)


def _decision(fields: dict[str, Any]) -> Decision:
    kind = _KINDS[fields.pop("kind")]
    if "places" in fields:
        fields["places"] = _places(fields["places"])
    return kind(**fields)
