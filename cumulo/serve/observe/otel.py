"""OpenTelemetry: one span per API call, made of its story when it has ended. Used with --otlp-endpoint only.

A caller's W3C `traceparent` becomes the parent. Attributes follow OpenTelemetry's conventions for generative AI
and HTTP; no text of prompts or answers is sent. Spans leave in batches from a thread of their own through a
bounded queue: a collector that is slow or away delays no request, and is complained about once.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from cumulo import __version__
from cumulo.serve.http.listening import wait_while
from cumulo.serve.observe.stories import Record, Stories
from cumulo.serve.observe.trace import Phase, Value, phases

log = logging.getLogger(__name__)

OPERATIONS = {  # by path; everything else is not traced
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_ABORT_PATIENCE_S = 5.0  # after a client has gone: for the engine to say how its request ended
_MOST_PROMPTS = 64  # of one call that have spans; the call's own counts are of all
_FLUSH_PATIENCE_S = 3.0  # when the server stops: for the collector to take the last spans


@dataclass(frozen=True, slots=True)
class TracedCall:
    """What HTTP knows of an ended call."""

    operation: str
    model: str
    path: str
    headers: Headers
    status: int
    call_id: str
    received_s: float
    ended_s: float


class Tracing:
    """Owns the way to the collector. Made before the server starts, told of calls by the gate, closed last."""

    def __init__(self, endpoint: str) -> None:
        url = endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
        ours = Resource({"service.name": "cumulo", "service.version": __version__})
        theirs = OTELResourceDetector().detect()  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
        self._exporter = _Exporter(url)
        self._provider = TracerProvider(
            resource=Resource.create().merge(ours).merge(theirs), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("cumulo.serve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._maker = ThreadPoolExecutor(1, "otel-spans")
        self._pending: set[asyncio.Task[None]] = set()

    def note(self, scope: Scope, status: int, model: str, stories: Stories) -> None:
        """A call has its answer, or its client has gone: have its spans made when its requests have ended."""
        operation = OPERATIONS.get(scope["path"])
        if operation is None or scope["method"] != "POST":
            return
        state, headers = scope["state"], Headers(scope=scope)
        call_id, ended_s = state.get("call_id", ""), time.perf_counter()
        call = TracedCall(
            operation, model, scope["path"], headers, status, call_id, state["received_s"], ended_s
        )
        task = asyncio.create_task(self._emit_when_ended(call, stories.of_call(call_id)))
        self._pending.add(task)  # a task nobody holds may be collected before it is done
        task.add_done_callback(self._pending.discard)

    async def _emit_when_ended(self, call: TracedCall, records: list[Record]) -> None:
        """Where the client has gone, the engine ends its requests within a step."""
        await wait_while(lambda: any(record.outcome is None for record in records), _ABORT_PATIENCE_S)
        # Elsewhere: a millisecond here would be one for every stream.
        self._maker.submit(self._emit_or_log, call, records)

    def _emit_or_log(self, call: TracedCall, records: list[Record]) -> None:
        try:
            self.emit(call, records)
        except Exception:  # the answer has been given; what is wrong with its trace is for the log
            log.exception("the trace of %s could not be made", call.call_id)

    def emit(self, call: TracedCall, records: list[Record]) -> None:
        """Make the spans of one ended call."""
        epoch_s = time.time() - time.perf_counter()  # of the clock that the stories use, as of now

        def to_ns(time_s: float) -> int:
            return int((time_s + epoch_s) * 1e9)

        root = self._tracer.start_span(
            f"{call.operation} {call.model}",
            context=self._propagator.extract(call.headers, Context()),
            kind=SpanKind.SERVER,
            attributes=_call_attributes(call, records),
            start_time=to_ns(call.received_s),
        )
        if root.is_recording():
            failed = call.status >= 500 or any(record.outcome == "error" for record in records)
            if failed:
                root.set_attribute("error.type", str(call.status) if call.status >= 500 else "engine")
                root.set_status(StatusCode.ERROR)
            for number, record in enumerate(records[:_MOST_PROMPTS]):
                self._emit_request(root, record, number if len(records) > 1 else None, to_ns)
        root.end(to_ns(call.ended_s))

    def _emit_request(
        self, root: Span, record: Record, number: int | None, to_ns: Callable[[float], int]
    ) -> None:
        """The phases of one prompt: directly below the call, or below a span of its own if there are several."""
        made = [Phase("tokenise", record.received_s, record.submitted_s)]
        if record.story is not None:
            made += phases(record.story)
        if number is not None:
            end_s = max([phase.end_s for phase in made] + [record.ended_s or 0.0])
            attributes = {"gen_ai.response.id": record.request_id, **_usage([record])}
            made = [Phase(f"prompt {number}", record.received_s, end_s, attributes, inner=made)]
        for phase in made:
            self._emit_phase(root, phase, to_ns)

    def _emit_phase(self, parent: Span, phase: Phase, to_ns: Callable[[float], int]) -> None:
        span = self._tracer.start_span(
            phase.name,
            context=set_span_in_context(parent, Context()),
            attributes=phase.attributes,
            start_time=to_ns(phase.start_s),
        )
        for mark in phase.marks:
            span.add_event(mark.name, mark.attributes, to_ns(mark.time_s))
        for inner in phase.inner:
            self._emit_phase(span, inner, to_ns)
        span.end(to_ns(phase.end_s))

    def close(self) -> None:
        """Send what is left, if the collector takes it within a few seconds. Blocks that long at most."""

        def flush() -> None:
            self._maker.shutdown()
            if not self._exporter.failing:
                self._provider.force_flush()
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # first: it ends the pauses between attempts
            self._provider.shutdown()

        # A daemon: a collector that keeps the connection open and says nothing must not keep the process.
        flushing = threading.Thread(target=flush, name="otel-flush", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_PATIENCE_S)


class _Exporter(OTLPSpanExporter):
    """Tells of failures when they begin and when they end, and not in between."""

    failing = False

    def __init__(self, url: str) -> None:
        super().__init__(endpoint=url)
        self._words = _Words()
        sdk_log = logging.getLogger("opentelemetry")  # it would tell of every attempt
        sdk_log.addHandler(self._words)
        sdk_log.propagate = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._words.first = None
        result = super().export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self.failing and not self._shutdown:
            log.warning(
                "traces cannot be sent to %s (%s); requests are served all the same and their traces dropped "
                "until they can",
                self._endpoint,
                self._words.first,
            )
        elif self.failing and not failed:
            log.info("traces are sent to %s again", self._endpoint)
        self.failing = failed
        return result


class _Words(logging.Handler):
    """What the SDK said first about a failure: that is where the cause is named."""

    first: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or record.getMessage()


def _call_attributes(call: TracedCall, records: list[Record]) -> dict[str, Value | list[str]]:
    found: dict[str, Value | list[str]] = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": "cumulo",
        "gen_ai.request.model": call.model,
        "http.request.method": "POST",
        "http.route": call.path,
        "url.path": call.path,
    }
    if call.status:
        found["http.response.status_code"] = call.status
    if call.call_id:
        found["gen_ai.response.id"] = call.call_id
    if records:
        found["gen_ai.response.model"] = call.model
        found["gen_ai.request.stream"] = records[0].stream
        found["gen_ai.request.choice.count"] = records[0].samples
        found["gen_ai.response.finish_reasons"] = [record.outcome or "unknown" for record in records]
        found["cumulo.caller"] = records[0].caller
        found |= _usage(records)
    firsts = [r.story.first_token_s for r in records if r.story and r.story.first_token_s is not None]
    if firsts and records[0].stream:
        found["gen_ai.response.time_to_first_chunk"] = min(firsts) - call.received_s
    return found


def _usage(records: list[Record]) -> dict[str, Value]:
    told = [record.story for record in records if record.story is not None]
    return {
        "gen_ai.usage.input_tokens": sum(record.prompt_tokens for record in records),
        "gen_ai.usage.output_tokens": sum(story.output_tokens for story in told),
        "gen_ai.usage.cache_read.input_tokens": sum(story.cached_tokens for story in told),
        "cumulo.preemptions": sum(story.preemptions for story in told),
        "cumulo.recomputed_tokens": sum(story.recomputed_tokens for story in told),
        "cumulo.retried_after_engine_restart": any(record.retried for record in records),
    }
