"""KEDA's external scaler with Cumulo's autoscaling rule behind it: the gRPC server of `cumulo kubernetes scaler`.

A ScaledObject's trigger says where the pods are and how to scale them, in the words of `cumulo serve --autoscale`:

    triggers:
    - type: external
      metadata: {scalerAddress: "chat-scaler:9090", pods: "chat-pods:8000", rule: "1..4,ttft=2s,start-up=60s,
                 prompt-tok-s=8000,output-tok-s=600"}

The metric is the number of replicas that the rule wants, one per replica, so KEDA's HPA arrives at that number.
"""

import functools
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from cumulo.base.strict import package_yaml
from cumulo.cluster.drivers.metrics_seen import MetricsWatch, forecast_rule
from cumulo.errors import ConfigError, CumuloError
from cumulo.fleet.decide.scaling import FleetSeen, ScaleTo

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

METRIC = "cumulo-replicas"
SERVICE = "externalscaler.ExternalScaler"
_ANSWER_S = 5.0  # for a pod to say its metrics
_WORKERS = 16  # calls at a time


def pod_metrics(address: str) -> dict[str, str]:
    """/metrics of every pod behind a name: a headless Service resolves to all its pods."""
    host, _, port = address.rpartition(":")
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
    except OSError:
        return {}  # a headless Service without a ready pod has no address
    with ThreadPoolExecutor(8) as pool:
        hosts = [f"[{one}]" if ":" in one else one for one in sorted(found)]
        texts = pool.map(lambda one: fetch(f"http://{one}:{port}/metrics"), hosts)
        return {one: text for one, text in zip(sorted(found), texts, strict=True) if text}


def fetch(url: str) -> str:
    """The text at a URL; empty where it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError, ValueError):
        return ""


class WatchedObject:
    """One ScaledObject: its rule, what it saw last, and what it wants."""

    def __init__(self, metadata: Mapping[str, str], read: Callable[[str], dict[str, str]]) -> None:
        for name in ("pods", "rule"):
            if not metadata.get(name):
                raise ConfigError(f"the trigger's metadata needs {name}; see docs/kubernetes.md")
        self.rule, slo = forecast_rule(metadata["rule"])
        self.pods, self.gateway = metadata["pods"], metadata.get("gateway", "")
        self._read, self._watch = read, MetricsWatch(slo)
        self.wanted = ScaleTo("both", max(1, self.rule.limits.fewest), "nothing was seen yet")
        self.looked_s = float("-inf")
        self.lock = threading.Lock()

    def look(self, now_s: float) -> None:
        """Ask the pods and the rule."""
        texts = self._read(self.pods)
        gateway = fetch(f"{self.gateway}/metrics") if self.gateway else ""
        starting = max(0, self.wanted.replicas - len(texts)) if self.looked_s > float("-inf") else 0
        before, self.looked_s = self.wanted, now_s
        seen = self._watch.seen(texts, starting, gateway)
        (self.wanted,) = self.rule.decide(FleetSeen(now_s, {"both": seen}))
        if before.replicas != self.wanted.replicas:
            counts = self.wanted.replicas, before.replicas
            log.info("%s: %d replicas, were %d: %s", self.pods, *counts, self.wanted.why)


class KedaScaler:
    """The calls of KEDA, without gRPC. `asked` is a ScaledObjectRef of externalscaler.proto."""

    def __init__(
        self,
        read: Callable[[str], dict[str, str]] = pod_metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self.objects: dict[tuple[str, str, tuple[tuple[str, str], ...]], WatchedObject] = {}
        self._lock = threading.Lock()

    def replicas(self, asked: Any) -> int:
        """What the rule wants. It is asked at its own interval, however often KEDA calls."""
        metadata = dict(asked.scalerMetadata)
        key = (asked.namespace, asked.name, tuple(sorted(metadata.items())))
        with self._lock:
            watched = self.objects.get(key)
            if watched is None:
                for old in [one for one in self.objects if one[:2] == key[:2]]:  # its manifest was changed
                    del self.objects[old]
                watched = self.objects[key] = WatchedObject(metadata, self._read)
        with watched.lock:  # pods that hang hold up nobody else
            if self._clock() - watched.looked_s >= watched.rule.interval_s:
                watched.look(self._clock())
            return watched.wanted.replicas


def serve_scaler(scaler: KedaScaler, address: str) -> tuple["grpc.Server", int]:
    """A gRPC server that has begun, and its port."""
    try:
        import grpc

        messages = scaler_messages()
    except ImportError as error:
        raise CumuloError("gRPC is not installed: pip install 'cumulo[keda]'") from error

    def is_active(asked: Any) -> Any:
        return messages["IsActiveResponse"](result=scaler.replicas(asked) > 0)

    def metric_spec(asked: Any) -> Any:
        scaler.replicas(asked)  # so that a wrong trigger is named at once
        spec = messages["MetricSpec"](metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return messages["GetMetricSpecResponse"](metricSpecs=[spec])

    def metrics(asked: Any) -> Any:
        count, name = scaler.replicas(asked.scaledObjectRef), asked.metricName or METRIC
        value = messages["MetricValue"](metricName=name, metricValue=count, metricValueFloat=float(count))
        return messages["GetMetricsResponse"](metricValues=[value])

    def handler(answer: Callable[[Any], Any], request: str = "ScaledObjectRef") -> Any:
        def call(asked: Any, context: Any) -> Any:
            try:
                return answer(asked)
            except CumuloError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

        return grpc.unary_unary_rpc_method_handler(call, messages[request].FromString, _bytes)

    handlers = {
        "IsActive": handler(is_active),
        "GetMetricSpec": handler(metric_spec),
        "GetMetrics": handler(metrics, "GetMetricsRequest"),
    }
    server = grpc.server(ThreadPoolExecutor(_WORKERS))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise CumuloError(f"cannot listen on {address}: {error}") from error
    server.start()
    return server, port


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString())


@functools.cache
def scaler_messages() -> dict[str, Any]:
    """The classes of KEDA's externalscaler.proto, by name, made by the protobuf library without generated code."""
    from google.protobuf import descriptor_pb2, json_format, message_factory

    content = package_yaml("cumulo.cluster.drivers.kubernetes", "data/externalscaler.yaml")
    file = json_format.ParseDict(content, descriptor_pb2.FileDescriptorProto())
    found = message_factory.GetMessages([file])
    return {name.rpartition(".")[2]: made for name, made in found.items()}
