"""Rules for what stands in front of pods: network policies, Gateways and their routes, Ingresses."""

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.drivers.kubernetes.manifest_source import FieldPath, Manifest
from cumulo.cluster.drivers.kubernetes.objects import ObjectSet

_DIRECTIONS = (("ingress", "from"), ("egress", "to"))


def check_network(one: Manifest, objects: ObjectSet) -> None:
    if one.kind == "NetworkPolicy":
        _check_policy(one, objects)
    elif one.kind == "Gateway":
        for path, ref in _certificates(one):
            if ref.get("kind", "Secret") == "Secret" and not ref.get("namespace"):
                objects.need(one, (*path, "name"), "Secret", ref.get("name"))
    elif one.kind in ("HTTPRoute", "GRPCRoute"):
        _check_route(one, objects)
    elif one.kind == "Ingress":
        _check_ingress(one, objects)


# -- network policies ---------------------------------------------------------------------------------------
def _check_policy(one: Manifest, objects: ObjectSet) -> None:
    for direction, side in _DIRECTIONS:
        for number, rule in enumerate(one.value("spec", direction) or ()):
            for place, peer in enumerate(rule.get(side) or () if isinstance(rule, dict) else ()):
                block = peer.get("ipBlock") if isinstance(peer, dict) else None
                if isinstance(block, dict):
                    _check_block(one, ("spec", direction, number, side, place, "ipBlock"), block)
                    if len(peer) > 1:
                        one.blame(
                            ("spec", direction, number, side, place),
                            "an ipBlock cannot stand next to a selector: make it an item of its own",
                        )
    labels = one.value("spec", "podSelector", "matchLabels")
    pods = [pod for pod in objects.pods if pod.owner.namespace == one.namespace]
    if not isinstance(labels, dict) or not labels or not pods:
        return
    chosen = objects.chosen_pods(labels, one.namespace)
    if not chosen:
        shown = ", ".join(f"{key}={value}" for key, value in labels.items())
        one.blame(
            ("spec", "podSelector", "matchLabels"),
            f"no pod here has the labels {shown}: the policy would protect nothing",
        )
        return
    named, numbers = ports_of(chosen)
    for number, rule in enumerate(one.value("spec", "ingress") or ()):
        for place, given in enumerate(rule.get("ports") or () if isinstance(rule, dict) else ()):
            port = given.get("port") if isinstance(given, dict) else None
            if numbers and port is not None and "endPort" not in given and port not in named | numbers:
                listed = ", ".join(map(str, sorted(numbers)))
                one.blame(
                    ("spec", "ingress", number, "ports", place, "port"),
                    f"the pods that this protects listen on {listed}, not on {port}",
                )


def _check_block(one: Manifest, path: FieldPath, block: Mapping[str, Any]) -> None:
    whole = _network(one, (*path, "cidr"), block.get("cidr"))
    for number, text in enumerate(block.get("except") or ()):
        part = _network(one, (*path, "except", number), text)
        if whole is None or part is None:
            continue
        if part.version != whole.version or part == whole or not part.subnet_of(whole):  # type: ignore[arg-type]
            one.blame((*path, "except", number), f"{text} is not a part of {block['cidr']}")


def _network(
    one: Manifest, path: FieldPath, text: Any
) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if not isinstance(text, str):
        return None
    try:
        if "/" not in text:
            raise ValueError
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        one.blame(path, f"{text!r} is not a range of addresses; write ADDRESS/BITS, such as 10.0.0.0/8")
        return None


def ports_of(pods: list[Any]) -> tuple[set[Any], set[Any]]:
    """Names and numbers of the ports of pods."""
    ports = [port for pod in pods for _, one in pod.containers for port in one.get("ports") or ()]
    named = {str(one["name"]) for one in ports if isinstance(one, dict) and one.get("name")}
    return named, {one["containerPort"] for one in ports if isinstance(one, dict) and "containerPort" in one}


# -- Gateways and routes ------------------------------------------------------------------------------------
def _certificates(one: Manifest) -> Iterator[tuple[FieldPath, Mapping[str, Any]]]:
    for number, listener in enumerate(one.value("spec", "listeners") or ()):
        tls = listener.get("tls") if isinstance(listener, dict) else None
        if isinstance(listener, dict) and listener.get("protocol") == "HTTPS" and not tls:
            one.blame(("spec", "listeners", number, "tls"), "is required and missing: the protocol is HTTPS")
        for place, ref in enumerate(tls.get("certificateRefs") or () if isinstance(tls, dict) else ()):
            if isinstance(ref, dict):
                yield ("spec", "listeners", number, "tls", "certificateRefs", place), ref


def _check_route(one: Manifest, objects: ObjectSet) -> None:
    listeners: list[Mapping[str, Any]] = []
    for number, ref in enumerate(one.value("spec", "parentRefs") or ()):
        if not isinstance(ref, dict) or ref.get("kind", "Gateway") != "Gateway" or ref.get("namespace"):
            continue
        path: FieldPath = ("spec", "parentRefs", number)
        objects.need(one, (*path, "name"), "Gateway", ref.get("name"))
        gateway = objects.find("Gateway", str(ref.get("name")), one.namespace)
        if gateway is None:
            continue
        some = [other for other in gateway.value("spec", "listeners") or () if isinstance(other, dict)]
        section = ref.get("sectionName")
        names = [str(other.get("name")) for other in some]
        if section is not None and section not in names:
            one.blame(
                (*path, "sectionName"),
                f"the Gateway {gateway.name} has no listener {section}{did_you_mean(str(section), names)}"
                f" (its listeners are {', '.join(names)})",
            )
        listeners += [other for other in some if section in (None, other.get("name"))]
    _check_hostnames(one, listeners)
    for number, rule in enumerate(one.value("spec", "rules") or ()):
        for place, ref in enumerate(rule.get("backendRefs") or () if isinstance(rule, dict) else ()):
            if isinstance(ref, dict):
                _check_backend(one, ("spec", "rules", number, "backendRefs", place), ref, objects)


def _check_hostnames(one: Manifest, listeners: list[Mapping[str, Any]]) -> None:
    hosts = [str(other["hostname"]) for other in listeners if other.get("hostname")]
    if len(hosts) < len(listeners) or not hosts:
        return  # a listener takes any
    for number, name in enumerate(one.value("spec", "hostnames") or ()):
        if not any(_meets(str(name), host) for host in hosts):
            one.blame(
                ("spec", "hostnames", number),
                f"its Gateway listens for {' and '.join(hosts)}, not for {name}",
            )


def _meets(one: str, other: str) -> bool:
    """Whether two host names, each maybe with a *. before it, have a host in common."""
    if one == other:
        return True
    return any(
        wide.startswith("*.") and host.endswith(wide[1:]) for wide, host in ((one, other), (other, one))
    )


def _check_backend(one: Manifest, path: FieldPath, ref: Mapping[str, Any], objects: ObjectSet) -> None:
    kind = str(ref.get("kind", "Service"))
    if ref.get("namespace"):
        return
    objects.need(one, (*path, "name"), kind, ref.get("name"))
    if kind != "Service":
        return
    if ref.get("port") is None:
        one.blame((*path, "port"), "is required and missing: the port of the Service")
        return
    _check_service_port(one, (*path, "port"), str(ref.get("name")), ref.get("port"), objects)


# -- Ingresses ----------------------------------------------------------------------------------------------
def _check_ingress(one: Manifest, objects: ObjectSet) -> None:
    for number, tls in enumerate(one.value("spec", "tls") or ()):
        if isinstance(tls, dict):
            objects.need(one, ("spec", "tls", number, "secretName"), "Secret", tls.get("secretName"))
    backends: list[tuple[FieldPath, Any]] = [
        (("spec", "defaultBackend"), one.value("spec", "defaultBackend"))
    ]
    for number, rule in enumerate(one.value("spec", "rules") or ()):
        http = rule.get("http") if isinstance(rule, dict) else None
        for place, entry in enumerate(http.get("paths") or () if isinstance(http, dict) else ()):
            if isinstance(entry, dict):
                start: FieldPath = ("spec", "rules", number, "http", "paths", place)
                backends.append(((*start, "backend"), entry.get("backend")))
                if entry.get("pathType") != "ImplementationSpecific" and not str(
                    entry.get("path", "/")
                ).startswith("/"):
                    one.blame((*start, "path"), f"must begin with /, got {entry['path']!r}")
    for path, backend in backends:
        service = backend.get("service") if isinstance(backend, dict) else None
        if not isinstance(service, dict):
            continue
        objects.need(one, (*path, "service", "name"), "Service", service.get("name"))
        for field, value in (service.get("port") or {}).items():
            if field in ("name", "number"):
                here: FieldPath = (*path, "service", "port", field)
                _check_service_port(one, here, str(service.get("name")), value, objects)


def _check_service_port(one: Manifest, path: FieldPath, name: str, port: Any, objects: ObjectSet) -> None:
    service = objects.find("Service", name, one.namespace)
    ports = [
        other
        for other in (service.value("spec", "ports") or () if service else ())
        if isinstance(other, dict)
    ]
    field = "name" if isinstance(port, str) else "port"
    known = [other.get(field) for other in ports if other.get(field) is not None]
    if ports and port not in known:
        listed = ", ".join(map(str, known)) or "without names"
        one.blame(path, f"the Service {name} has no port {port}; its ports are {listed}")
