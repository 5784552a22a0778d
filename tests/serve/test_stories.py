"""Stories and what is made of them, without a server."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cumulo.engine.decide.story import PreemptionCause, Story
from cumulo.serve.engine_link.messages import FairnessReport, Ready, Stats
from cumulo.serve.observe.metrics import MOST_TENANTS, OTHER_TENANTS, Metrics
from cumulo.serve.observe.stories import Record, Stories, explanation
from cumulo.serve.observe.trace import chrome_trace


def eventful(cause: PreemptionCause = "kv_blocks") -> Story:
    """Queued behind others, then for a slot, then for blocks; preempted once."""
    story = Story(10.0, prompt_tokens=640, first_token_s=15.0)
    story.add(10.0, "arrived", prompt_tokens=640, behind=37)
    story.block(11.0, "slots", "1 of the 256 slots in use")
    story.block(12.0, "slots", "2 of the 256 slots in use")
    story.block(13.0, "kv_blocks", "4 of the 90 KV blocks in use")
    story.admit(14.0, 3, tokens=640, cached=512, lost=0)
    story.add(15.0, "first_token")
    story.preempt(16.0, 9, cause, "other", "which needed it", blocks=40)
    story.block(17.0, "kv_blocks", "1 of the 90 KV blocks in use")
    story.admit(20.0, 12, tokens=640, cached=0, lost=640)
    story.add(25.0, "finished", sample=0, reason="length", tokens=11)
    story.finish(25.0, output_tokens=11)
    return story


def record(request_id: str = "a", call_id: str = "a", **more: object) -> Record:
    fields: dict[str, object] = {
        "caller": "ann", "model": "m", "received_s": 9.5, "submitted_s": 9.75, "prompt_tokens": 640, "samples": 1,
        "stream": True, "story": eventful(), "outcome": "length", "ended_s": 25.5,
    } | more  # fmt: skip
    return Record(request_id, call_id, **fields)  # type: ignore[arg-type]


def test_every_second_of_waiting_has_a_reason() -> None:
    story = eventful()
    assert story.waits_s == {"behind_others": 1.0, "slots": 2.0, "kv_blocks": 1.0, "preempted": 4.0}
    assert sum(event.kind == "blocked" for event in story.events) == 3  # one line for each change


def test_a_request_that_never_ran_waited_to_its_end() -> None:
    story = Story(10.0)
    story.add(10.0, "arrived", prompt_tokens=1, behind=0)
    story.block(11.0, "fair_share", "others")
    story.finish(13.0, output_tokens=0)
    assert story.waits_s == {"behind_others": 1.0, "fair_share": 2.0}


def test_a_story_does_not_grow_with_the_time_of_waiting() -> None:
    story = Story(0.0)
    story.add(0.0, "arrived", prompt_tokens=1, behind=0)
    for step in range(10_000):
        story.block(float(step), "slots" if step % 2 else "token_budget", "something")
    assert len(story.events) <= 200
    story.admit(10_000.0, 1, tokens=1, cached=0, lost=0)
    assert sum(story.waits_s.values()) == 10_000 and story.waits_s["slots"] == 5_000


def test_an_explanation_names_what_happened() -> None:
    told = record()
    for time_s in (15.0, 15.5, 21.0):
        told.note_token(time_s)
    explained = explanation(told)
    for words in (
        "queued 4.00 s behind 37 requests", "waited for 1 of the 256 slots in use; then for 4 of the 90 KV blocks",
        "prefix cache hit 512 of 640 tokens", "preempted in step 9 by other, which needed it",
        "640 tokens recomputed", "longest 5500.0 ms", "stopped at max_tokens after 11 tokens", "16.00 s in all",
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
    metrics.on_end(record(story=eventful("priority")))
    metrics.on_end(record(story=eventful("kv_blocks")))
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


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """By the labels beyond the model's and the engine's."""
    return {
        tuple(
            value for label, value in sample.labels.items() if label not in ("model_name", "engine")
        ): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name == name
    }


def served(*rows: tuple[str, int, int], index: float = 1.0) -> Stats:
    return Stats(1, 1, 0, 0, 0, 8, 0, 0, fairness=FairnessReport(index, list(rows)))


def test_what_each_tenant_was_served_is_counted_and_the_number_of_series_is_bounded() -> None:
    metrics = Metrics("m")
    assert samples(metrics, "cumulo:fairness_index") == {(): 1.0}
    for _ in range(2):
        metrics.on_progress(served(("ann", 30, 5), ("bob", 0, 2), index=0.75))
    assert samples(metrics, "cumulo:fairness_index") == {(): 0.75}
    metrics.on_progress(served(*((f"tenant {number}", 1, 1) for number in range(3 * MOST_TENANTS))))
    metrics.on_progress(served(("ann", 1, 1)))
    counted = samples(metrics, "cumulo:tenant_tokens_total")
    assert counted["prompt", "ann"] == 61 and counted["output", "ann"] == 11 and counted["output", "bob"] == 4
    assert len(counted) == 2 * (MOST_TENANTS + 1)
    assert counted["output", OTHER_TENANTS] == 2 * MOST_TENANTS + 2


def test_the_ledgers_ratios_are_those_of_the_engine_that_runs() -> None:
    def ready(**measured: int | None) -> Ready:
        rows = [
            {"name": name, "predicted_bytes": 300, "measured_bytes": held} for name, held in measured.items()
        ]
        return Ready("m", 8, 8, 8, [], {}, 8, 16, 8, 8, "", {"rows": rows})

    metrics = Metrics("m")
    metrics.on_ready(ready(**{"weights": 200, "kv cache": 300, "logits": None}))
    name = "cumulo:ledger_predicted_over_measured"
    assert samples(metrics, name) == {("weights",): pytest.approx(1.5), ("kv_cache",): 1.0}
    metrics.on_ready(ready(weights=400))
    assert samples(metrics, name) == {("weights",): 0.75}
