"""KubernetesDriver: submits a job's manifests with kubectl, and reads back how the job is. `cumulo launch --on
kubernetes` uses it.

Objects have the job's name, so a second submission changes nothing. Without kubectl, `--out` writes the files.
"""

import json
import re
from typing import Any

from cumulo.cluster.drivers.driver import Facts, TargetLost, note_submission, run_tool
from cumulo.cluster.drivers.kubernetes.manifests import FILL_IN, as_yaml, job_manifests
from cumulo.cluster.drivers.kubernetes.pod_template import Body
from cumulo.cluster.job_store import ENDED, JobRecord
from cumulo.errors import ConfigError

_RESOURCES = {  # of the object that is the job: kind and group, as kubectl names them
    "Job": "jobs.batch", "Deployment": "deployments.apps", "LeaderWorkerSet":
    "leaderworkersets.leaderworkerset.x-k8s.io", "RayJob": "rayjobs.ray.io", "RayService": "rayservices.ray.io",
}  # fmt: skip
_LOST = re.compile(
    r"connection refused|no such host|i/o timeout|unable to connect|timed out|eof|service unavailable", re.I
)
_IDENTITY = re.compile(r"unauthorized|must be logged in|expired|certificate", re.I)
_SUBMISSION = "cumulo.dev/submission"  # annotation: which job of which store the object is
_KEPT = "the job is kept, and the next `cumulo jobs` or the same `cumulo launch` submits it, once"


class KubernetesDriver:
    def explain(self, record: JobRecord) -> str:
        return as_yaml(_bodies(record))

    def submit(self, record: JobRecord) -> Facts:
        bodies = _bodies(record)
        for body in bodies:
            if body["kind"] == "Secret" and FILL_IN in body["stringData"].values():
                raise ConfigError(
                    f"the Secret {body['metadata']['name']} has values to fill in: create a Secret with them "
                    "(kubectl create secret generic), and name it in the job file under kubernetes.secret"
                )
        self._make_way(record, _work(bodies))
        note_submission(record)
        self._call("apply", "--server-side", "--field-manager=cumulo", "-f", "-", text=as_yaml(bodies))
        body = _work(bodies)
        return {
            "handle": f"{_resource(body)}/{body['metadata']['name']}",
            "state": "queued",
            "reason": "submitted",
        }

    def _make_way(self, record: JobRecord, work: Body) -> None:
        """Objects have the job's name. One of an earlier job that has ended is deleted; one that runs stays, and is
        not taken for this job."""
        name, space = f"{_resource(work)}/{work['metadata']['name']}", record.job.kubernetes.namespace
        printed = self._call("get", name, f"--namespace={space}", "--output=json", "--ignore-not-found")
        if not printed.strip():
            return
        found = json.loads(printed)
        whose = (found["metadata"].get("annotations") or {}).get(_SUBMISSION, "")
        if whose == work["metadata"]["annotations"][_SUBMISSION]:
            return  # an answer was lost on the way
        state = facts_of(found)["state"]
        if state not in ENDED:
            raise ConfigError(
                f"{name} is in the namespace {space} already, and is {state}"
                + (f" (submitted as {whose.partition(' ')[0]})" if whose else "")
                + ": cancel it, or choose another name for this job"
            )
        self._call("delete", name, f"--namespace={space}", "--ignore-not-found")

    def look(self, record: JobRecord) -> Facts:
        namespace = f"--namespace={record.job.kubernetes.namespace}"
        printed = self._call("get", record.handle, namespace, "--output=json", "--ignore-not-found")
        if not printed.strip():
            return {"state": "cancelled", "reason": f"{record.handle} is no longer in the cluster"}
        return facts_of(json.loads(printed))

    def cancel(self, record: JobRecord) -> Facts:
        text = as_yaml([body for body in job_manifests(record.job) if not _is_shared(body)])
        self._call("delete", "--ignore-not-found", "--wait=false", "-f", "-", text=text)
        return {"state": "cancelled", "reason": "cancelled by its user"}

    def _call(self, *words: str, text: str = "") -> str:
        try:
            done = run_tool(["kubectl", *words], _KEPT, text)
        except FileNotFoundError:
            raise ConfigError(
                "kubectl is not installed here: write the manifests with --out DIR, and apply them where it is"
            ) from None
        if done.returncode == 0:
            return done.stdout
        message = " ".join(done.stderr.split())
        if _IDENTITY.search(message):
            raise TargetLost(
                f"the cluster does not accept this account ({message}): log in again, and try kubectl auth whoami",
                _KEPT,
            )
        if _LOST.search(message):
            raise TargetLost(f"the cluster does not answer ({message})", _KEPT)
        raise ConfigError(f"kubectl {words[0]}: {message}")


def facts_of(body: Body) -> Facts:
    """Where a job is, from the status of its object."""
    status: dict[str, Any] = body.get("status") or {}
    kind, group = body["kind"], body["apiVersion"].rpartition("/")[0]
    if kind == "Job" and group == "batch.volcano.sh":
        phase = (status.get("state") or {}).get("phase", "Pending")
        states = {
            "Running": "running", "Completed": "done", "Failed": "failed", "Aborted": "cancelled",
            "Terminated": "failed", "Restarting": "queued", "Completing": "running",
        }  # fmt: skip
        why = (status.get("state") or {}).get("message") or f"Volcano says {phase}"
        return {"state": states.get(phase, "queued"), "reason": why}
    if kind == "Job":
        return _of_job(body, status)
    if kind == "RayJob":
        said = str(status.get("jobStatus") or status.get("jobDeploymentStatus") or "PENDING")
        states = {"RUNNING": "running", "SUCCEEDED": "done", "FAILED": "failed", "STOPPED": "cancelled"}
        return {
            "state": states.get(said, "queued"),
            "reason": status.get("message") or f"KubeRay says {said}",
        }
    ready = int(status.get("readyReplicas") or status.get("numServeEndpoints") or 0)
    wanted = int((body.get("spec") or {}).get("replicas") or 1)
    if ready:
        return {"state": "running", "reason": f"{ready} of {wanted} replicas are ready"}
    messages = [
        str(one["message"])
        for one in status.get("conditions") or ()
        if one.get("status") != "True" and one.get("message")
    ]
    return {"state": "queued", "reason": "; ".join(messages) or "no replica is ready yet"}


def _of_job(body: Body, status: dict[str, Any]) -> Facts:
    true = {one["type"]: one for one in status.get("conditions") or () if one.get("status") == "True"}
    if "Complete" in true:
        return {"state": "done", "reason": "all pods ended well"}
    if "Failed" in true:
        return {"state": "failed", "reason": str(true["Failed"].get("message") or "its pods failed")}
    if (body.get("spec") or {}).get("suspend"):
        return {"state": "queued", "reason": "its queue has not admitted it yet"}
    if status.get("active"):
        return {"state": "running", "reason": f"{status['active']} pods are active"}
    return {"state": "queued", "reason": "its pods have not been created yet"}


def _bodies(record: JobRecord) -> list[Body]:
    """The manifests of the job, of which the object that is the job says which submission it is of."""
    bodies = job_manifests(record.job)
    _work(bodies)["metadata"]["annotations"] = {_SUBMISSION: f"{record.job_id} {record.key}"}
    return bodies


def _work(bodies: list[Body]) -> Body:
    return next(body for body in bodies if body["kind"] in _RESOURCES)


def _resource(body: Body) -> str:
    if body["kind"] == "Job" and body["apiVersion"].startswith("batch.volcano.sh"):
        return "jobs.batch.volcano.sh"
    return _RESOURCES[body["kind"]]


def _is_shared(body: Body) -> bool:
    """Queues and the network's shape serve other jobs, too."""
    return body["kind"] in ("Queue", "HyperNode", "ClusterQueue", "LocalQueue", "ResourceFlavor", "Topology")
