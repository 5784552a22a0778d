"""KEDA's external scaler answers a real gRPC client whose messages are Google's own protobuf, and its answers are
those of the autoscaling rule on what the pods' metrics say."""

import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cumulo.cluster.drivers.kubernetes.keda_scaler import (
    METRIC,
    SERVICE,
    KedaScaler,
    pod_metrics,
    scaler_messages,
    serve_scaler,
)
from cumulo.cluster.drivers.metrics_seen import MetricsWatch, read_counters
from cumulo.serve.observe.metrics import Metrics
from cumulo.spec.slo import Slo

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("google.protobuf", reason="protobuf is not installed")
RULE = "0..5,interval=10s,idle=30s,start-up=20s,ttft=1s,prompt-tok-s=1000,output-tok-s=100"


def pod(ended: int, in_time: int, running: int = 0, waiting: int = 0) -> str:
    """/metrics of a pod that has answered so many requests of 500 and 50 tokens."""
    return "\n".join(
        [
            f'cumulo:num_requests_running{{model_name="m"}} {running}',
            f'cumulo:num_requests_waiting{{model_name="m"}} {waiting}',
            f'cumulo:request_success_total{{finished_reason="stop"}} {ended}.0',
            f"cumulo:prompt_tokens_total {500 * ended}.0",
            f"cumulo:generation_tokens_total {50 * ended}.0",
            f'cumulo:time_to_first_token_seconds_bucket{{le="0.5"}} {in_time}',
            f'cumulo:time_to_first_token_seconds_bucket{{le="1.5"}} {in_time}',
            f'cumulo:time_to_first_token_seconds_bucket{{le="+Inf"}} {ended}',
        ]
    )


MESSAGES = scaler_messages()


class Cluster:
    """Pods, a clock, and a real gRPC channel to the scaler."""

    def __init__(self) -> None:
        self.now_s, self.pods = 0.0, dict[str, str]()
        self.scaler = KedaScaler(lambda address: self.pods, lambda: self.now_s)
        self.server, port = serve_scaler(self.scaler, "127.0.0.1:0")
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def ref(self, **metadata: str) -> Any:
        given = {"pods": "chat-pods:8000", "rule": RULE} | metadata
        return MESSAGES["ScaledObjectRef"](name="chat", namespace="default", scalerMetadata=given)

    def call(self, method: str, request: Any, answer: str) -> Any:
        ask = self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=MESSAGES[answer].FromString,
        )
        return ask(request, timeout=300)

    def wanted(self) -> int:
        request = MESSAGES["GetMetricsRequest"](scaledObjectRef=self.ref(), metricName=METRIC)
        (value,) = self.call("GetMetrics", request, "GetMetricsResponse").metricValues
        assert value.metricName == METRIC
        assert value.metricValueFloat == value.metricValue
        return int(value.metricValue)

    def active(self) -> bool:
        return bool(self.call("IsActive", self.ref(), "IsActiveResponse").result)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.channel.close()
    made.server.stop(0).wait()


def test_replicas_follow_the_load_of_the_pods_to_zero_and_back(cluster: Cluster) -> None:
    (spec,) = cluster.call("GetMetricSpec", cluster.ref(), "GetMetricSpecResponse").metricSpecs
    assert (spec.metricName, spec.targetSize) == (METRIC, 1)
    ended, wanted = 0, []
    for _ in range(12):  # three requests per second, each a second of a replica
        cluster.now_s += 10
        ended += 30
        cluster.pods = {"10.0.0.1": pod(ended, ended)}
        wanted.append(cluster.wanted())
    assert wanted[-1] in (3, 4)
    for _ in range(12):
        cluster.now_s += 10
        wanted.append(cluster.wanted())
    assert wanted[-1] == 0 and not cluster.active()
    cluster.pods = {}
    cluster.now_s += 10
    assert cluster.wanted() == 0
    cluster.pods = {"10.0.0.2": pod(0, 0, waiting=1)}
    cluster.now_s += 10
    assert cluster.active()


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"rule": "1..4"}, "needs prompt-tok-s and output-tok-s"),
        ({"rule": "4"}, "begins with the fewest and the most replicas"),
        ({"pods": ""}, "metadata needs pods"),
    ],
)
def test_a_trigger_that_says_too_little_is_named(
    cluster: Cluster, metadata: dict[str, str], words: str
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as failed:
        cluster.call("GetMetricSpec", cluster.ref(**metadata), "GetMetricSpecResponse")
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_messages_have_the_bytes_of_kedas_own_definition() -> None:
    """Field numbers and types of externalscaler.proto, encoded by hand."""
    ref = MESSAGES["ScaledObjectRef"](name="chat", namespace="n", scalerMetadata={"a": "b"})
    assert ref.SerializeToString() == b"\x0a\x04chat\x12\x01n\x1a\x06\x0a\x01a\x12\x01b"
    value = MESSAGES["MetricValue"](metricName="m", metricValue=3, metricValueFloat=1.0)
    answer = MESSAGES["GetMetricsResponse"](metricValues=[value])
    assert answer.SerializeToString() == b"\x0a\x0e\x0a\x01m\x10\x03\x19" + struct.pack("<d", 1.0)
    assert MESSAGES["IsActiveResponse"](result=True).SerializeToString() == b"\x08\x01"


def test_late_requests_are_counted_from_the_histogram_of_first_tokens() -> None:
    watch = MetricsWatch(Slo(ttft_s=1.0))
    watch.seen({"a": pod(100, 100)})
    seen = watch.seen({"a": pod(200, 140), "b": pod(20, 20, running=3)})
    assert (seen.ready, seen.ended, seen.ended_in_slo) == (2, 120, 60)
    assert (seen.arrived, seen.running, seen.mean_output_tokens) == (123, 3, 50.0)
    again = watch.seen({"a": pod(10, 10), "b": pod(20, 20)})  # a was started again
    assert (again.ended, again.ended_in_slo) == (10, 10)


def test_the_servers_own_metrics_are_read_from_every_pod_behind_a_name() -> None:
    text = Metrics("m").text(with_names=True)
    counters = read_counters(text.decode())
    assert {"num_requests_running", "num_requests_waiting", "prompt_tokens_total"} <= counters.values.keys()

    class Pod(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pod)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        assert list(pod_metrics(f"127.0.0.1:{server.server_port}")) == ["127.0.0.1"]
    finally:
        server.shutdown()
        server.server_close()
    assert pod_metrics("no-such-name.invalid:80") == {}
