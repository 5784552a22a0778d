"""Stories and what is made of them, without a server."""

from cumulo.engine.story import Story
from cumulo.serve.metrics import Metrics, waits
from cumulo.serve.stories import Record, Stories, explanation
from cumulo.serve.trace import chrome_trace


def eventful() -> Story:
    """Queued behind others, then for a slot, then for blocks; preempted once."""
    story = Story(10.0, prompt_tokens=640, admitted_s=14.0, first_token_s=15.0, finished_s=25.0)
    story.cached_tokens, story.recomputed_tokens, story.preemptions, story.output_tokens = 512, 640, 1, 11
    story.add(10.0, "arrived", prompt_tokens=640, behind=37)
    story.add(11.0, "blocked", why="1 of the 256 slots in use")
    story.add(13.0, "blocked", why="4 of the 90 KV blocks in use")
    story.add(14.0, "admitted", step=3, cached=512, tokens=640, sample=0)
    story.add(15.0, "first_token")
    story.add(16.0, "preempted", step=9, by="other", blocks=40, how="recomputed later (configured)")
    story.add(20.0, "resumed", step=12, how="recomputing", recomputed=640, cached=0)
    story.add(25.0, "finished", sample=0, reason="length", tokens=11)
    return story


def record(request_id: str = "a", call_id: str = "a", **more: object) -> Record:
    fields: dict[str, object] = {
        "caller": "ann", "model": "m", "received_s": 9.5, "submitted_s": 9.75, "prompt_tokens": 640, "samples": 1,
        "stream": True, "story": eventful(), "outcome": "length", "ended_s": 25.5,
    } | more  # fmt: skip
    return Record(request_id, call_id, **fields)  # type: ignore[arg-type]


def test_every_second_of_waiting_has_a_reason() -> None:
    assert waits(eventful()) == {"behind_others": 1.0, "slots": 2.0, "kv_blocks": 1.0, "preempted": 4.0}


def test_an_explanation_names_what_happened() -> None:
    told = record()
    for time_s in (15.0, 15.5, 21.0):
        told.note_token(time_s)
    explained = explanation(told)
    for words in (
        "queued 4.00 s behind 37 requests", "waited for 1 of the 256 slots in use; then for 4 of the 90 KV blocks",
        "prefix cache hit 512 of 640 tokens", "preempted in step 9 by other, recomputed later (configured)",
        "640 tokens recomputed", "longest 5500.0 ms", "ended by length after 11 tokens", "16.00 s in all",
    ):  # fmt: skip
        assert words in explained["summary"]
    assert explained["times_ms"]["first_token"] == 5500
    assert explained["times_ms"]["gap_max"] == 5500
    assert explained["events"][0]["at_ms"] == 500


def test_a_running_request_has_a_story_too() -> None:
    explained = explanation(record(story=None, outcome=None, ended_s=None))
    assert explained["state"] == "running" and "Still running" in explained["summary"]


def test_only_the_last_are_kept() -> None:
    stories = Stories(capacity=3)
    for number in range(5):
        stories.add(record(f"call-{number // 2}-{number % 2}", f"call-{number // 2}"))
    assert [r.request_id for r in stories.recent(10)] == ["call-2-0", "call-1-1", "call-1-0"]
    assert stories.of_call("call-0") == []
    assert [r.request_id for r in stories.of_call("call-1")] == ["call-1-0", "call-1-1"]
    assert [r.request_id for r in stories.of_call("call-1-1")] == ["call-1-1"]


def test_preemptions_are_counted_by_reason() -> None:
    metrics = Metrics("m")
    metrics.on_end(record(priority=5), lambda name: {"other": 0}.get(name))
    metrics.on_end(record(priority=0), lambda name: {"other": 0}.get(name))
    text = metrics.text().decode()
    for line in (
        'cumulo:preemptions_by_reason_total{engine="0",model_name="m",reason="priority"} 1.0',
        'cumulo:preemptions_by_reason_total{engine="0",model_name="m",reason="kv_blocks"} 1.0',
        'cumulo:recomputed_tokens_total{engine="0",model_name="m"} 1280.0',
        'cumulo:wait_seconds_total{engine="0",model_name="m",reason="preempted"} 8.0',
        'cumulo:num_preemptions_total{engine="0",model_name="m"} 2.0',
        'cumulo:prefix_cache_hits_total{engine="0",model_name="m"} 1024.0',
    ):
        assert line in text.splitlines()


def test_a_trace_shows_the_preemption() -> None:
    events = chrome_trace([record()])["traceEvents"]
    (span,) = [event for event in events if event["name"] == "preempted"]
    assert (span["ts"], span["dur"]) == (16e6, 4e6)
