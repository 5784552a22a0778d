"""What a schema cannot say of Volcano's jobs, KEDA's triggers and Deployments' strategies. Called by sense.py."""

from collections.abc import Mapping
from typing import Any

from cumulo.base.nearest import nearest
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.words import check_word

# Of Volcano's policies, for a whole job and for a task.
_EVENTS = (
    "*", "PodPending", "PodRunning", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "TaskFailed",
    "OutOfSync", "CommandIssued", "JobUpdated",
)  # fmt: skip
_ACTIONS = (
    "AbortJob", "RestartJob", "RestartTask", "RestartPod", "RestartPartition", "TerminateJob", "CompleteJob",
    "ResumeJob", "SyncJob", "EnqueueJob", "SyncQueue", "OpenQueue", "CloseQueue",
)  # fmt: skip
_PLUGINS = ("ssh", "svc", "env", "pytorch", "tensorflow", "mpi", "ray", "hcclrank")
# KEDA has some seventy triggers; those that services of this kind use, and what their metadata needs.
_TRIGGERS: Mapping[str, tuple[str, ...]] = {
    "prometheus": ("serverAddress", "query", "threshold"),
    "cron": ("timezone", "start", "end", "desiredReplicas"),
    "external": ("scalerAddress",),
    "external-push": ("scalerAddress",),
    "cpu": ("value",),
    "memory": ("value",),
    "kafka": ("topic",),
    "rabbitmq": ("value",),
    "redis": ("listName",),
    "metrics-api": ("targetValue", "url", "valueLocation"),
}


def check_gang(manifest: Manifest, spec: Mapping[str, Any]) -> None:
    tasks = [one for one in spec.get("tasks") or () if isinstance(one, dict)]
    _check_policies(manifest, spec, ("spec",))
    for number, one in enumerate(tasks):
        _check_policies(manifest, one, ("spec", "tasks", number))
        first = next(at for at, other in enumerate(tasks) if other.get("name") == one.get("name"))
        if first != number and one.get("name"):
            manifest.blame(
                ("spec", "tasks", number, "name"),
                f"task {first} is called {one['name']}, too; each needs its own",
            )
    plugins = spec.get("plugins")
    for name in plugins if isinstance(plugins, dict) else ():
        check_word(manifest, ("spec", "plugins", str(name)), name, _PLUGINS)
    _check_sizes(manifest, spec, tasks)


def _check_sizes(manifest: Manifest, spec: Mapping[str, Any], tasks: list[dict[str, Any]]) -> None:
    total = sum(one.get("replicas", 1) for one in tasks if isinstance(one.get("replicas", 1), int))
    gang = spec.get("minAvailable")
    if isinstance(gang, int) and tasks and gang > total >= 0:
        manifest.blame(
            ("spec", "minAvailable"),
            f"{gang} is more than the {total} pods of all tasks: it would never start",
        )
    for number, one in enumerate(tasks):
        least, count = one.get("minAvailable"), one.get("replicas", 1)
        if isinstance(least, int) and isinstance(count, int) and least > count:
            manifest.blame(
                ("spec", "tasks", number, "minAvailable"), f"{least} is more than replicas, {count}"
            )


def _check_policies(manifest: Manifest, owner: Mapping[str, Any], path: FieldPath) -> None:
    for number, one in enumerate(owner.get("policies") or ()):
        if isinstance(one, dict):
            check_word(manifest, (*path, "policies", number, "event"), one.get("event"), _EVENTS)
            check_word(manifest, (*path, "policies", number, "action"), one.get("action"), _ACTIONS)


def check_triggers(manifest: Manifest, spec: Mapping[str, Any]) -> None:
    for number, one in enumerate(spec.get("triggers") or ()):
        if not isinstance(one, dict) or not isinstance(one.get("type"), str):
            continue
        kind, metadata = one["type"], one.get("metadata")
        close = nearest(kind, list(_TRIGGERS)) if kind not in _TRIGGERS else []
        if close:  # others exist, and only what looks like one of these is a slip
            manifest.blame(
                ("spec", "triggers", number, "type"), f"cannot be {kind!r}; did you mean {close[0]}?"
            )
        for name in _TRIGGERS.get(kind, ()):
            if isinstance(metadata, dict) and name not in metadata:
                manifest.blame(
                    ("spec", "triggers", number, "metadata", name),
                    f"is required and missing, because the trigger's type is {kind}",
                )


def check_strategy(manifest: Manifest, spec: Mapping[str, Any]) -> None:
    strategy = spec.get("strategy")
    if isinstance(strategy, dict) and strategy.get("type") == "Recreate" and strategy.get("rollingUpdate"):
        manifest.blame(
            ("spec", "strategy", "rollingUpdate"), "is not allowed with type: Recreate; remove one of the two"
        )
