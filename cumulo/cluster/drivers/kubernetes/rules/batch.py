"""Rules for Jobs, CronJobs, JobSets, Deployments' updates and claims for devices."""

import re
from collections.abc import Sequence
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.pods import PodSpec

_RUN_TO_THE_END = {"Job": "batch", "CronJob": "batch", "JobSet": "jobset.x-k8s.io", "ScaledJob": "keda.sh"}
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_CRON: Sequence[tuple[str, int, int, Sequence[str]]] = (
    ("minute", 0, 59, ()), ("hour", 0, 23, ()), ("day of the month", 1, 31, ()), ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 7, _DAYS),
)  # fmt: skip
_CRON_NAMES = ("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly")


def check_batch_rules(manifest: Manifest) -> None:
    if manifest.kind == "CronJob":
        _check_schedule(manifest)
    if manifest.kind == "JobSet":
        _check_job_set(manifest)
    if manifest.kind in ("Deployment", "DaemonSet"):
        _check_update(manifest)
    if manifest.kind in ("ResourceClaim", "ResourceClaimTemplate"):
        _check_device_claim(manifest)


def check_restart(pod: PodSpec) -> None:
    """A pod that runs to its end must say what happens if it fails."""
    owner = pod.owner
    if _RUN_TO_THE_END.get(owner.kind) == owner.group and pod.spec.get("restartPolicy") not in (
        "Never",
        "OnFailure",
    ):
        owner.blame((*pod.path, "restartPolicy"), f"a {owner.kind} needs restartPolicy: Never or OnFailure")


def _check_schedule(manifest: Manifest) -> None:
    text, path = manifest.value("spec", "schedule"), ("spec", "schedule")
    if not isinstance(text, str) or text in _CRON_NAMES or text.startswith("@every "):
        return
    if text.startswith(("TZ=", "CRON_TZ=")):
        manifest.blame(path, "must not have a time zone; use the field timeZone")
        return
    fields = text.split()
    if text.startswith("@") or len(fields) != len(_CRON):
        names = ", ".join(name for name, *_ in _CRON)
        manifest.blame(path, f"{text!r} is not a schedule: it needs five fields, {names}, or @daily")
        return
    for value, (name, low, high, words) in zip(fields, _CRON, strict=True):
        if wrong := _wrong_part(value, low, high, words):
            manifest.blame(path, f"the {name} cannot be {wrong}: it is {low} to {high}, such as * or */5")


def _wrong_part(value: str, low: int, high: int, words: Sequence[str]) -> str:
    for part in value.split(","):
        found = re.fullmatch(r"(\*|\?|\w+)(?:-(\w+))?(?:/(\d+))?", part)
        if found is None or found[3] == "0":
            return part
        for end in (found[1], found[2]):
            if end is None or end in "*?" or end.lower() in words:
                continue
            if not end.isdigit() or not low <= int(end) <= high:
                return part
    return ""


def _check_job_set(manifest: Manifest) -> None:
    jobs = [one for one in manifest.value("spec", "replicatedJobs") or () if isinstance(one, dict)]
    names = [str(one.get("name")) for one in jobs]
    wanted: list[tuple[FieldPath, Any]] = [
        (("spec", "coordinator", "replicatedJob"), manifest.value("spec", "coordinator", "replicatedJob"))
    ]
    lists: list[FieldPath] = [("spec", "successPolicy", "targetReplicatedJobs")]
    rules = manifest.value("spec", "failurePolicy", "rules")
    lists += [
        ("spec", "failurePolicy", "rules", number, "targetReplicatedJobs")
        for number in range(len(rules or ()))
    ]
    for path in lists:
        wanted += [((*path, number), name) for number, name in enumerate(manifest.value(*path) or ())]
    for number, one in enumerate(jobs):
        if names.index(str(one.get("name"))) != number:
            manifest.blame(
                ("spec", "replicatedJobs", number, "name"), f"two of them are called {one['name']}"
            )
        for place, other in enumerate(one.get("dependsOn") or ()):
            here: FieldPath = ("spec", "replicatedJobs", number, "dependsOn", place, "name")
            name = other.get("name") if isinstance(other, dict) else None
            wanted.append((here, name))
            if name in names[number:]:
                manifest.blame(here, f"{name} is not before it in the list, so it cannot be waited for")
    for path, name in wanted:
        if isinstance(name, str) and name not in names:
            manifest.blame(path, f"there is no replicated job {name}{did_you_mean(name, names)}")


def _check_update(manifest: Manifest) -> None:
    if manifest.value("spec", "selector") in ({}, {"matchLabels": {}}):
        manifest.blame(("spec", "selector"), "is empty: it must select the pods of the template")
    field = "strategy" if manifest.kind == "Deployment" else "updateStrategy"
    path: FieldPath = ("spec", field, "rollingUpdate")
    given = manifest.value(*path)
    if not isinstance(given, dict):
        return
    surge, gone = (str(given.get(name, otherwise)).rstrip("%")
                   for name, otherwise in (("maxSurge", "25%" if field == "strategy" else "0"),
                                           ("maxUnavailable", "25%" if field == "strategy" else "1")))  # fmt: skip
    if surge == gone == "0":
        manifest.blame(path, "maxSurge and maxUnavailable are both 0: no pod could ever be replaced")


def _check_device_claim(manifest: Manifest) -> None:
    start: FieldPath = ("spec", "spec") if manifest.kind == "ResourceClaimTemplate" else ("spec",)
    requests = [one for one in manifest.value(*start, "devices", "requests") or () if isinstance(one, dict)]
    names = [str(one.get("name")) for one in requests]
    for number, one in enumerate(requests):
        path: FieldPath = (*start, "devices", "requests", number)
        if manifest.api_version.endswith("/v1beta1"):
            if not one.get("deviceClassName") and not one.get("firstAvailable"):
                manifest.blame((*path, "deviceClassName"), "is required and missing")
            continue
        given = [name for name in ("exactly", "firstAvailable") if name in one]
        if len(given) != 1:
            manifest.blame(
                path, f"needs either exactly or firstAvailable, and has {'both' if given else 'neither'}"
            )
        exactly = one.get("exactly")
        if isinstance(exactly, dict) and exactly.get("allocationMode") == "All" and "count" in exactly:
            manifest.blame((*path, "exactly", "count"), "must be left out with allocationMode: All")
    for number, one in enumerate(manifest.value(*start, "devices", "constraints") or ()):
        for place, name in enumerate(one.get("requests") or () if isinstance(one, dict) else ()):
            if str(name).partition("/")[0] not in names:
                manifest.blame(
                    (*start, "devices", "constraints", number, "requests", place),
                    f"there is no request {name}{did_you_mean(str(name), names)}",
                )
