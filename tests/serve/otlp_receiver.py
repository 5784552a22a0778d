"""An OpenTelemetry collector for the tests: takes OTLP over HTTP, parses the protobuf, keeps the spans."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


class OtlpReceiver:
    def __init__(self, port: int = 0) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                wanted = (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
                if wanted:
                    receiver.take(body)
                self.send_response(200 if wanted else 404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.bodies.append(body)
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # -- asking -------------------------------------------------------------------------------------------
    def roots(self) -> list[Any]:
        """Spans whose parent was not made here."""
        made = {span.span_id for span in self.spans}
        return [span for span in self.spans if span.parent_span_id not in made]

    def below(self, parent: Any) -> dict[str, Any]:
        """Its children by name."""
        return {span.name: span for span in self.spans if span.parent_span_id == parent.span_id}


def attributes(pairs: "list[KeyValue]") -> dict[str, Any]:
    return {pair.key: _plain(pair.value) for pair in pairs}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind)
