"""Core objects that their schemas accept and a cluster refuses or never starts. Each is named at its field, and
without the break nothing is said. They were written without a look at the checks."""

import copy
from typing import Any

import pytest

from cumulo.cluster.drivers.kubernetes.check import check_bodies

POD: dict[str, Any] = {"containers": [{"name": "main", "image": "ghcr.io/acme/engine:1.2"}]}
NEVER = {**POD, "restartPolicy": "Never"}


def _object(api: str, kind: str, spec: Any = None, **more: Any) -> dict[str, Any]:
    found = {"apiVersion": api, "kind": kind, "metadata": {"name": "x"}, **more}
    return found if spec is None else {**found, "spec": spec}


def _deployment(**pod: Any) -> dict[str, Any]:
    template = {"metadata": {"labels": {"app": "x"}}, "spec": {**POD, **pod}}
    return _object("apps/v1", "Deployment", {"selector": {"matchLabels": {"app": "x"}}, "template": template})


def _container(**fields: Any) -> dict[str, Any]:
    return {"containers": [{**POD["containers"][0], **fields}]}


PATH = "spec.template.spec.containers[0]"
PORT_80 = {"containerPort": 8000, "hostPort": 80}
TWO = [{**POD["containers"][0], "name": name, "ports": [dict(PORT_80)]} for name in ("a", "b")]
NET, RBAC = "networking.k8s.io/v1", "rbac.authorization.k8s.io"
RULE = {"paths": [{"path": "/", "pathType": "Prefix", "backend": {"resource": {"kind": "B", "name": "b"}}}]}
STATEFUL = {
    "selector": {"matchLabels": {"app": "x"}},
    "template": {"metadata": {"labels": {"app": "x"}}, "spec": POD},
}
SLEEP = {"preStop": {"exec": {"command": ["sh", "-c", "sleep 60"]}}}
# the object, the field that breaks it and its place, a word of the message, and a value that is right (None: none)
BREAKS: list[tuple[dict[str, Any], list[str | int], Any, Any, str, str]] = [
    (_deployment(**_container(lifecycle=SLEEP)), ["spec", "template", "spec", "terminationGracePeriodSeconds"], 10,
     90, f"{PATH}.lifecycle.preStop", "killed 10 s after"),
    (_object("batch/v1", "Job", {"completionMode": "Indexed", "template": {"spec": NEVER}}),
     ["spec", "completions"], None, 4, "spec.completions", "Indexed"),
    (_object("apps/v1", "StatefulSet", STATEFUL), ["spec", "serviceName"], "", None,
     "spec.serviceName", "headless"),
    (_object("v1", "PersistentVolumeClaim", {"accessModes": ["ReadWriteMany"]}), ["spec", "resources"], None,
     {"requests": {"storage": "100Gi"}}, "spec.resources.requests.storage", "required"),
    (_object(NET, "Ingress", {"rules": [{"http": RULE}]}), ["spec", "rules", 0, "host"], "https://a.b", "a.b",
     "spec.rules[0].host", "without scheme"),
    (_object(NET, "NetworkPolicy", {"podSelector": {}, "ingress": [{"ports": [{"port": 9000}]}]}),
     ["spec", "ingress", 0, "ports", 0, "endPort"], 8000, 9100, "spec.ingress[0].ports[0].endPort", "9000"),
    (_object(f"{RBAC}/v1", "ClusterRoleBinding", roleRef={"apiGroup": RBAC, "name": "y"}), ["roleRef", "kind"],
     "Role", "ClusterRole", "roleRef.kind", "ClusterRole"),
    (_deployment(containers=TWO), ["spec", "template", "spec", "containers", 1, "ports", 0, "hostPort"], 80, 81,
     "spec.template.spec.containers[1].ports[0].hostPort", "container a"),
    (_deployment(**_container(securityContext={"runAsNonRoot": True})),
     ["spec", "template", "spec", "containers", 0, "securityContext", "runAsUser"], 0, 1000,
     f"{PATH}.securityContext.runAsUser", "root"),
    (_deployment(**_container(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}])),
     ["spec", "template", "spec", "containers", 0, "env", 0, "value"], "1", None, f"{PATH}.env[0]", "keep one"),
    (_object("v1", "ResourceQuota", {"hard": {}}), ["spec", "hard", "pods"], "-8", "8",
     "spec.hard.pods", "0 or more"),
    (_object("v1", "LimitRange", {"limits": [{"type": "Container", "max": {"memory": "16Gi"}}]}),
     ["spec", "limits", 0, "min"], {"memory": "64Gi"}, {"memory": "1Gi"}, "spec.limits[0].min.memory", "16Gi"),
    (_object("scheduling.k8s.io/v1", "PriorityClass"), ["value"], 2_000_000_000, 1000, "value", "1,000,000,000"),
    (_object("v1", "Service", {"type": "ExternalName"}), ["spec", "externalName"], None, "a.b", "spec.externalName",
     "ExternalName"),
    (_object("v1", "Service", {"type": "NodePort", "ports": [{"port": 80}]}), ["spec", "clusterIP"], "None", None,
     "spec.clusterIP", "NodePort"),
]  # fmt: skip


def _with(body: dict[str, Any], path: list[str | int], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    at: Any = body
    for step in path[:-1]:
        at = at[step]
    if value is None:
        at.pop(path[-1], None)
    else:
        at[path[-1]] = value
    return body


@pytest.mark.parametrize("case", BREAKS, ids=lambda case: case[4])
def test_what_a_cluster_refuses_is_named_at_its_field(case):
    body, path, wrong, right, field, word = case
    problem, *_ = check_bodies([_with(body, path, wrong)])
    assert problem.path == field and word in problem.message
    assert check_bodies([_with(body, path, right)]) == []
