"""OpenTelemetry traces: sent by a real server to a collector that parses OTLP."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from cumulo.engine.decide.story import Story
from cumulo.errors import CumuloError
from cumulo.serve.observe.stories import Record
from cumulo.serve.observe.trace import phases
from cumulo.serve.options import ServeOptions
from tests.ports import reserved_port
from tests.serve.running_server import (
    MODEL,
    RunningServer,
    needs_built_in_model,
    quick_model,
    running_server,
    wait_for,
)

pytestmark = pytest.mark.long

needs_otel = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry") is None
    or importlib.util.find_spec("opentelemetry.exporter") is None,
    reason="opentelemetry is not installed (pip install -e '.[otel]')",
)
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "marmalade quagmire"
CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": f"Say {SECRET}"}], "temperature": 0, "max_tokens": 6,
}  # fmt: skip


def eventful() -> Story:
    """Queued behind others, then for a slot; preempted once while it decoded."""
    story = Story(10.0, prompt_tokens=640, admitted_s=14.0, first_token_s=15.0, finished_s=25.0)
    story.cached_tokens, story.recomputed_tokens, story.preemptions, story.output_tokens = 512, 640, 1, 11
    story.add(10.0, "arrived", prompt_tokens=640, behind=37)
    story.add(11.0, "blocked", why="1 of the 256 slots in use")
    story.add(14.0, "admitted", step=3, cached=512, tokens=640)
    story.add(15.0, "first_token")
    story.add(16.0, "preempted", step=9, by="other", blocks=40)
    story.add(20.0, "resumed", step=12, recomputed=640, cached=0)
    story.add(25.0, "finished", sample=0, reason="length", tokens=11)
    return story


# -- the story in phases ------------------------------------------------------------------------------------------
def test_a_story_becomes_phases_without_gaps() -> None:
    queued, prefill, decode = phases(eventful())
    assert [(p.name, p.start_s, p.end_s) for p in (queued, prefill, decode)] == [
        ("queued", 10, 14),
        ("prefill", 14, 15),
        ("decode", 15, 25),
    ]
    assert [mark.name for mark in queued.marks] == ["arrived", "blocked"]
    (away,) = decode.inner
    assert (away.name, away.start_s, away.end_s) == ("preempted", 16, 20)
    assert away.attributes["cumulo.preempted.by"] == "other"
    assert away.attributes["cumulo.resumed.recomputed"] == 640


def test_a_story_that_ends_early_has_only_the_phases_it_reached() -> None:
    story = eventful()
    story.admitted_s = story.first_token_s = story.finished_s = None
    del story.events[2:]
    (queued,) = phases(story)
    assert (queued.name, queued.end_s) == ("queued", 11)


def test_errors_may_quote_the_caller_and_stay_out() -> None:
    story = eventful()
    story.add(25.0, "failed", error=f"cannot guide {SECRET}")
    assert SECRET not in repr(phases(story))


def test_an_endpoint_without_a_scheme_is_refused() -> None:
    with pytest.raises(CumuloError, match="for instance http://"):
        ServeOptions(otlp_endpoint="localhost:4317")


def test_nothing_of_opentelemetry_is_imported_unless_it_is_asked_for() -> None:
    code = (
        "import sys, cumulo.cli.serve, cumulo.serve.server\n"  # FastAPI may import the API, which does nothing
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exp'))])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert told.stdout == "[]\n", told.stderr


# -- a preemption, as a collector sees it -------------------------------------------------------------------------
@needs_otel
def test_a_preempted_request_shows_when_it_was_away() -> None:
    from cumulo.serve.observe.otel import TracedCall, Tracing
    from tests.serve.otlp_receiver import OtlpReceiver, attributes

    collector = OtlpReceiver()
    tracing = Tracing(collector.url)
    call = TracedCall("chat", "m", "/v1/chat/completions", Headers(), 200, "a", received_s=9.5, ended_s=26.0)
    ended = Record(
        "a", "a", "ann", "m", received_s=9.5, submitted_s=9.75, prompt_tokens=640, samples=1, stream=True,
        story=eventful(), outcome="length", ended_s=25.5,
    )  # fmt: skip
    tracing.emit(call, [ended])
    tracing.close()
    collector.close()
    (root,) = collector.roots()
    assert root.name == "chat m"
    told = attributes(root.attributes)
    assert told["cumulo.preemptions"] == 1 and told["cumulo.recomputed_tokens"] == 640
    assert told["gen_ai.usage.cache_read.input_tokens"] == 512
    decode = collector.below(root)["decode"]
    away = collector.below(decode)["preempted"]
    assert away.end_time_unix_nano - away.start_time_unix_nano == pytest.approx(4e9, abs=1e4)
    assert attributes(away.attributes)["cumulo.preempted.blocks"] == 40
    assert collector.resources[0]["service.name"] == "cumulo"


# -- a real server, whose collector comes later -------------------------------------------------------------------
@pytest.fixture(scope="module")
def collectors_port() -> int:
    """Of a collector that does not run yet."""
    return reserved_port()


@pytest.fixture(scope="module")
def traced(collectors_port: int) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds until a batch leaves
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")  # seconds until the collector counts as away
        with running_server(
            quick_model(), "--no-console", "--otlp-endpoint", f"http://127.0.0.1:{collectors_port}"
        ) as running:
            yield running


@needs_otel
@needs_built_in_model
@pytest.mark.long
def test_traces_tell_the_story_and_a_missing_collector_costs_no_answer(
    traced: RunningServer, collectors_port: int
) -> None:
    """One server for all of it: they are slow to start."""
    from tests.serve.otlp_receiver import OtlpReceiver, attributes

    for _ in range(3):
        assert traced.post("/v1/chat/completions", CHAT).status_code == 200
        wait_for(lambda: "traces cannot be sent" in traced.log, "the complaint", traced)
    assert traced.log.count("traces cannot be sent") == 1
    assert "Connection refused" in traced.log

    collector = OtlpReceiver(collectors_port)
    endless = {"max_tokens": 4000, "stream": True, "ignore_eos": True}
    called = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    chat = traced.post("/v1/chat/completions", CHAT, headers=called).json()
    both = traced.post("/v1/completions", {"model": MODEL, "prompt": ["One", "Two"], "max_tokens": 3}).json()
    refused = traced.post("/v1/chat/completions", CHAT | {"model": "another"})
    unsampled = {"traceparent": f"00-{TRACE[::-1]}-{CALLER}-00"}
    traced.post("/v1/chat/completions", CHAT, headers=unsampled)
    with httpx.stream(
        "POST",
        f"{traced.url}/v1/chat/completions",
        json=CHAT | endless,
        timeout=60,
    ) as leaving:
        next(leaving.iter_lines())
    traced.post("/v1/chat/completions", CHAT)

    def by_id() -> dict[str, Any]:
        return {attributes(root.attributes).get("gen_ai.response.id"): root for root in collector.roots()}

    wait_for(lambda: {chat["id"], both["id"]} <= set(by_id()), "the spans", traced)

    def aborted() -> list[Any]:
        return [
            root
            for root in collector.roots()
            if attributes(root.attributes).get("gen_ai.response.finish_reasons") == ["abort"]
        ]

    (left,) = wait_for(aborted, "the span of the client that left", traced)
    assert {"queued", "prefill", "decode"} <= set(collector.below(left))

    root = by_id()[chat["id"]]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, CALLER)
    assert root.name == f"chat {MODEL}" and root.kind == root.SPAN_KIND_SERVER
    told = attributes(root.attributes)
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.usage.input_tokens"] == chat["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == chat["usage"]["completion_tokens"] == 6
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["http.response.status_code"] == 200
    parts = [collector.below(root)[name] for name in ("tokenise", "queued", "prefill", "decode")]
    assert all(part.trace_id == root.trace_id for part in parts)
    for earlier, later in pairwise(parts):
        assert earlier.start_time_unix_nano <= earlier.end_time_unix_nano <= later.start_time_unix_nano + 1000
    assert root.start_time_unix_nano <= parts[0].start_time_unix_nano
    assert parts[-1].end_time_unix_nano <= root.end_time_unix_nano
    assert "admitted" in {event.name for event in parts[2].events}

    two = collector.below(by_id()[both["id"]])
    assert set(two) == {"prompt 0", "prompt 1"}
    assert "decode" in collector.below(two["prompt 1"])

    assert refused.status_code == 404
    statuses = [attributes(r.attributes)["http.response.status_code"] for r in collector.roots()]
    assert 404 in statuses
    assert bytes.fromhex(TRACE[::-1]) not in {span.trace_id for span in collector.spans}

    spans_before = len(collector.spans)
    last = traced.post("/v1/chat/completions", CHAT).json()
    assert traced.end() == 0  # what had not left yet leaves now
    assert len(collector.spans) > spans_before and last["id"] in by_id()
    collector.close()
    everything = b"".join(collector.bodies)
    assert MODEL.encode() in everything and SECRET.encode() not in everything
    assert b"marmalade" not in everything
    assert traced.log.count("traces cannot be sent") == 1 and "are sent to" in traced.log
