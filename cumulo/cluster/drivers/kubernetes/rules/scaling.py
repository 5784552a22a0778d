"""Rules for autoscalers that their schemas leave open: how fast an HPA may move, and what KEDA's triggers ask whom.
Called with all objects together.
"""

import re
from collections.abc import Mapping
from typing import Any

from cumulo.base.nearest import did_you_mean, nearest
from cumulo.cluster.decide.autoscale.settings import parse_autoscale
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.objects import ObjectSet
from cumulo.cluster.drivers.kubernetes.pods import quantity
from cumulo.cluster.drivers.kubernetes.words import check_word
from cumulo.errors import ConfigError

# Of /metrics of `cumulo serve`, which autoscalers ask for; a name that is nearly one of these is a slip.
_METRICS = ("cumulo:num_requests_waiting", "cumulo:num_requests_running", "cumulo:kv_cache_usage_perc")
_SLIP = 0.93
_METRIC = re.compile(r"cumulo:\w+")
_MOST_WINDOW_S, _MOST_PERIOD_S = 3600, 1800  # of the API server
_PAIRS = {")": "(", "]": "[", "}": "{"}
_SCALER = ("pods", "rule", "gateway")  # what Cumulo's scaler reads of a trigger
_PROMETHEUS = (
    "serverAddress", "query", "threshold", "activationThreshold", "namespace", "customHeaders", "ignoreNullValues",
    "unsafeSsl", "authModes", "queryParameters", "metricName", "timeout", "cortexOrgID", "cortexOrgId",
)  # fmt: skip


def check_scaling(one: Manifest, objects: ObjectSet) -> None:
    if one.kind == "HorizontalPodAutoscaler":
        _check_behavior(one, ("spec", "behavior"))
        for number, metric in enumerate(one.value("spec", "metrics") or ()):
            _check_metric(one, ("spec", "metrics", number), metric)
    if one.kind == "ScaledObject":
        _check_behavior(one, ("spec", "advanced", "horizontalPodAutoscalerConfig", "behavior"))
        names: dict[str, int] = {}
        for number, trigger in enumerate(one.value("spec", "triggers") or ()):
            if isinstance(trigger, dict):
                _check_trigger(one, ("spec", "triggers", number), trigger, objects)
                name = trigger.get("name")
                if name and names.setdefault(str(name), number) != number:
                    text = f"trigger {names[str(name)]} is called {name}, too; each needs its own name"
                    one.blame(("spec", "triggers", number, "name"), text)


def _check_behavior(one: Manifest, path: FieldPath) -> None:
    for way in ("scaleUp", "scaleDown"):
        here: FieldPath = (*path, way)
        window = one.value(*here, "stabilizationWindowSeconds")
        if isinstance(window, int) and window > _MOST_WINDOW_S:
            one.blame((*here, "stabilizationWindowSeconds"), f"must be 0 to {_MOST_WINDOW_S}, got {window}")
        check_word(one, (*here, "selectPolicy"), one.value(*here, "selectPolicy"), ("Max", "Min", "Disabled"))
        for number, policy in enumerate(one.value(*here, "policies") or ()):
            if not isinstance(policy, dict):
                continue
            at: FieldPath = (*here, "policies", number)
            check_word(one, (*at, "type"), policy.get("type"), ("Pods", "Percent"))
            for name, most in (("periodSeconds", _MOST_PERIOD_S), ("value", None)):
                value = policy.get(name)
                if isinstance(value, int) and (value < 1 or (most is not None and value > most)):
                    range_of = f"1 to {most}" if most is not None else "1 or more"
                    one.blame((*at, name), f"must be {range_of}, got {value}")


def _check_metric(one: Manifest, path: FieldPath, metric: Any) -> None:
    """Of the kind Pods or External: only averages of pods, and names that the server has."""
    for field in ("pods", "object", "external"):
        part = metric.get(field) if isinstance(metric, dict) else None
        if not isinstance(part, dict):
            continue
        name = part.get("metric")
        if isinstance(name, dict):
            _check_names(one, (*path, field, "metric", "name"), str(name.get("name")))
        target = part.get("target")
        kind = target.get("type") if isinstance(target, dict) else None
        for amount in ("averageValue", "value"):
            given = target.get(amount) if isinstance(target, dict) else None
            if given is not None and (quantity(given) or 0.0) <= 0:
                one.blame((*path, field, "target", amount), f"must be more than 0, got {given}")
        if field == "pods" and kind in ("Utilization", "Value"):
            text = f"must be AverageValue for a metric of pods, got {kind}"
            one.blame((*path, field, "target", "type"), text)


def _check_names(one: Manifest, path: FieldPath, text: str) -> None:
    for name in _METRIC.findall(text):
        if name not in _METRICS and (close := nearest(name, _METRICS, likeness=_SLIP)):
            one.blame(path, f"cumulo serve has no metric {name}; did you mean {close[0]}?")


# -- KEDA ---------------------------------------------------------------------------------------------------
def _check_trigger(one: Manifest, path: FieldPath, trigger: Mapping[str, Any], objects: ObjectSet) -> None:
    asked, kind = trigger.get("metadata"), trigger.get("type")
    if not isinstance(asked, dict):
        return
    here: FieldPath = (*path, "metadata")
    if kind == "prometheus":
        _check_prometheus(one, here, asked)
    elif kind in ("external", "external-push"):
        _check_service(one, (*here, "scalerAddress"), asked.get("scalerAddress"), objects)
        if any(name in asked for name in _SCALER):
            _check_rule(one, here, asked)
            _check_service(one, (*here, "pods"), asked.get("pods"), objects)


def _check_prometheus(one: Manifest, path: FieldPath, asked: Mapping[str, Any]) -> None:
    address, query = asked.get("serverAddress"), asked.get("query")
    if isinstance(address, str) and not address.startswith(("http://", "https://")):
        one.blame((*path, "serverAddress"), f"must begin with http:// or https://, got {address!r}")
    if isinstance(query, str):
        _check_names(one, (*path, "query"), query)
        if wrong := _unbalanced(query):
            one.blame((*path, "query"), f"is not a query of Prometheus: {wrong}")
    for name in ("threshold", "activationThreshold"):
        value = asked.get(name)
        if isinstance(value, str) and not re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", value.strip()):
            one.blame((*path, name), f"must be a number, got {value!r}")
    for name in asked:
        if name not in _PROMETHEUS and (close := nearest(str(name), _PROMETHEUS, likeness=0.8)):
            one.blame((*path, str(name)), f"is not a setting of the trigger; did you mean {close[0]}?")


def _unbalanced(query: str) -> str:
    """Which bracket or quote has no partner."""
    open_: list[str] = []
    bare = re.sub(r'"(\\.|[^"\\])*"' + r"|'(\\.|[^'\\])*'", "", query)
    if '"' in bare or "'" in bare:
        return "a quote is not closed"
    for letter in bare:
        if letter in _PAIRS.values():
            open_.append(letter)
        elif letter in _PAIRS and (not open_ or open_.pop() != _PAIRS[letter]):
            return f"{letter} closes nothing"
    return f"{open_[-1]} is not closed" if open_ else ""


def _check_rule(one: Manifest, path: FieldPath, asked: Mapping[str, Any]) -> None:
    """What `cumulo kubernetes scaler` needs."""
    known = (*_SCALER, "scalerAddress", "tlsCertFile", "caCert", "tlsClientCert", "tlsClientKey", "unsafeSsl")
    for name in ("pods", "rule"):
        if not asked.get(name):
            one.blame((*path, name), "is required and missing: Cumulo's scaler reads it")
    for name in asked:
        if name not in known:
            text = f"is not a setting of Cumulo's scaler{did_you_mean(str(name), known)}"
            one.blame((*path, str(name)), text)
    rule = asked.get("rule")
    if not isinstance(rule, str) or not rule:
        return
    try:
        settings = parse_autoscale(rule)
    except ConfigError as error:
        one.blame((*path, "rule"), str(error).removeprefix("--autoscale "))
        return
    if settings.prompt_tok_s is None or settings.output_tok_s is None:
        one.blame(
            (*path, "rule"), "needs prompt-tok-s and output-tok-s: what a replica serves within the SLO"
        )
    low, high = one.value("spec", "minReplicaCount") or 0, one.value("spec", "maxReplicaCount") or 100
    if (settings.limits.fewest, settings.limits.most) != (low, high):
        one.blame(
            (*path, "rule"),
            f"is for {settings.limits.fewest} to {settings.limits.most} replicas, and the ScaledObject has "
            f"minReplicaCount {low} and maxReplicaCount {high}",
        )


def _check_service(one: Manifest, path: FieldPath, address: Any, objects: ObjectSet) -> None:
    """`NAME.NAMESPACE:PORT` of a Service in the same namespace."""
    if not isinstance(address, str) or not address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        one.blame(path, f"must be HOST:PORT, got {address!r}")
        return
    name, _, space = host.partition(".")
    if space.partition(".")[0] not in ("", one.namespace) or "/" in host:
        return
    objects.need(one, path, "Service", name)
    found = objects.find("Service", name, one.namespace)
    ports = [item.get("port") for item in found.value("spec", "ports") or ()] if found is not None else []
    if ports and int(port) not in ports:
        listed = ", ".join(map(str, ports))
        one.blame(path, f"the Service {name} has no port {port}; its ports are {listed}")
