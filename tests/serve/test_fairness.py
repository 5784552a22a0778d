"""Two API keys at one server: who asks for much does not keep the other from being answered."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cumulo.serve.access.keys import new_key
from tests.serve.running_server import (
    MODEL,
    RunningServer,
    needs_built_in_model,
    quick_model,
    running_server,
    wait_for,
)

pytestmark = [needs_built_in_model, pytest.mark.long]

TRIES = 10
HEAVY_REQUESTS, HEAVY_OUTPUT, LIGHT_REQUESTS, LIGHT_OUTPUT = 24, 40, 3, 2


Story = dict[str, Any]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, str, str]]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    heavy, light, operator = new_key(path, "heavy"), new_key(path, "light"), new_key(path, "operator")
    entries = json.loads(path.read_text())
    entries["keys"][2]["may_see_names"] = True
    path.write_text(json.dumps(entries))
    with running_server(
        quick_model(), "--api-keys", str(path), "--max-running", "2", "--no-console"
    ) as server:
        server.operator_key = operator
        yield server, heavy, light


def stories_of(server: RunningServer, key: str, call_id: str) -> list[Story]:
    answer = server.get(f"/v1/requests/{call_id}/explain", headers={"Authorization": f"Bearer {key}"})
    found: list[Story] = answer.json()["data"]
    return found


def moment_ms(story: Story, kind: str) -> float:
    """When it happened, on the clock that all stories share."""
    at_ms: float = next(event["at_ms"] for event in story["events"] if event["kind"] == kind)
    return float(story["received_at"]) * 1e3 + at_ms


def waiting_before(story: Story, others: list[Story]) -> list[Story]:
    """Those of the others that came earlier and still waited when this one came."""
    at_ms = moment_ms(story, "arrived")
    return [one for one in others if moment_ms(one, "arrived") < at_ms < moment_ms(one, "admitted")]


def both_ask(
    guarded: tuple[RunningServer, str, str],
    much: dict[str, Any],
    seen: Callable[[], bool],
    little: list[dict[str, Any]],
    in_time: Callable[[list[Story], list[Story]], bool],
) -> tuple[Any, list[Story], list[Story], int]:
    """The heavy user asks for `much`, and when that is `seen` the light one for each of `little`. The heavy answer,
    both users' stories, and how often they asked: again where the stories tell that the light one was not
    `in_time`, because this process had to wait for its turn."""
    server, heavy_key, light_key = guarded
    light_client, heavy_client = server.client(light_key), server.client(heavy_key)
    for tries in range(1, TRIES + 1):
        answers: list[Any] = []
        # Another salt each time: nothing of the last try is found in the cache.
        asked = much | {"extra_body": much.get("extra_body", {}) | {"cache_salt": f"try {tries}"}}

        def ask_for_much(answers: list[Any] = answers, asked: dict[str, Any] = asked) -> None:
            answers.append(heavy_client.completions.create(**asked))

        asking = threading.Thread(target=ask_for_much)
        asking.start()
        wait_for(lambda answers=answers: seen() or answers, "the heavy user's work", server)
        light_ids = [light_client.completions.create(**one).id for one in little]
        asking.join()
        assert answers, server.log
        heavy = stories_of(server, heavy_key, answers[0].id)
        light = [story for name in light_ids for story in stories_of(server, light_key, name)]
        if in_time(heavy, light):
            return answers[0], heavy, light, tries
    raise AssertionError(f"in {TRIES} tries the light user never came in time")


def test_a_light_users_requests_overtake_a_heavy_users_queue(guarded: tuple[RunningServer, str, str]) -> None:
    server, _, _ = guarded
    greedy: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
    prompts = [f"The number {number} is" for number in range(HEAVY_REQUESTS)]
    _, heavy, light, tries = both_ask(
        guarded,
        {"prompt": prompts, "max_tokens": HEAVY_OUTPUT, **greedy},
        lambda: server.sample("cumulo:num_requests_waiting") > HEAVY_REQUESTS / 2,
        [
            {"prompt": f"Light {number}", "max_tokens": LIGHT_OUTPUT, **greedy}
            for number in range(LIGHT_REQUESTS)
        ],
        # All but the two that may go first are overtaken.
        lambda heavy, light: sum(len(waiting_before(one, heavy)) - 2 for one in light) > HEAVY_REQUESTS / 4,
    )
    assert len(heavy) == HEAVY_REQUESTS and len(light) == LIGHT_REQUESTS
    overtaken = 0
    for story in light:
        waiting, admitted_ms = waiting_before(story, heavy), moment_ms(story, "admitted")
        went_first = [one for one in waiting if moment_ms(one, "admitted") < admitted_ms]
        # In order of arrival, all that wait would have gone first.
        assert len(went_first) <= 2, story["summary"]
        overtaken += len(waiting) - len(went_first)
    assert overtaken > HEAVY_REQUESTS / 4
    passed_over = [one for one in heavy if "served less" in one["summary"]]
    assert passed_over, "nobody was told that fairness made them wait"

    # What was served, as /metrics tells it: engine's own counts, by key.
    output = tries * HEAVY_REQUESTS * HEAVY_OUTPUT
    wait_for(
        lambda: server.sample("cumulo:tenant_tokens_total", tenant="heavy", kind="output") == output,
        "the report of what was served", server,
    )  # fmt: skip
    assert server.sample("cumulo:tenant_tokens_total", tenant="light", kind="output") == (
        tries * LIGHT_REQUESTS * LIGHT_OUTPUT
    )
    assert 0 < server.sample("cumulo:tenant_tokens_total", tenant="light", kind="prompt") <= 30 * tries
    assert 0.5 <= server.sample("cumulo:fairness_index") <= 1
    for reason in ("slots", "behind_others", "preempted"):  # the light one got a place of the heavy one
        assert server.sample("cumulo:wait_seconds_total", reason=reason) > 0, reason


@pytest.mark.thorough
def test_a_long_prompt_of_one_key_does_not_delay_anothers_first_token(
    guarded: tuple[RunningServer, str, str],
) -> None:
    server, _, light_key = guarded
    greedy: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 1}
    server.client(light_key).completions.create(prompt=[500], **greedy)  # it is about, so steps are shared
    _, (heavy,), (light,), _ = both_ask(
        guarded,
        {"prompt": [token % 3_000 + 100 for token in range(6_000)], **greedy},
        lambda: server.sample("cumulo:num_requests_running") > 0,
        [{"prompt": [501], **greedy}],
        lambda heavy, light: (
            moment_ms(heavy[0], "admitted")
            < moment_ms(light[0], "arrived")
            < moment_ms(heavy[0], "first_token")
        ),
    )
    assert moment_ms(light, "first_token") < moment_ms(heavy, "first_token")
    assert any("shared with other keys" in event["words"] for event in heavy["events"]), heavy["events"]


def test_a_key_that_holds_all_places_gives_one_to_another(guarded: tuple[RunningServer, str, str]) -> None:
    server, _, _ = guarded
    asked: dict[str, Any] = {"n": 2, "max_tokens": 500, "extra_body": {"ignore_eos": True}}
    answer, (heavy,), (light,), _ = both_ask(
        guarded,
        {"model": MODEL, "prompt": "Many", **asked},
        lambda: server.sample("cumulo:num_requests_running") > 0,
        [{"model": MODEL, "prompt": [501], "max_tokens": 1}],
        lambda heavy, light: (
            0.9 * moment_ms(heavy[0], "finished") + 0.1 * moment_ms(heavy[0], "first_token")
            > moment_ms(light[0], "arrived")
        ),
    )
    assert moment_ms(light, "first_token") < moment_ms(heavy, "finished")
    preempted = [event["cause"] for event in heavy["events"] if event["kind"] == "preempted"]
    assert preempted == ["fair_share"], heavy["events"]
    assert all(choice.finish_reason == "length" for choice in answer.choices)


def test_a_key_cannot_end_fair_shares_by_asking_for_a_promise(
    guarded: tuple[RunningServer, str, str],
) -> None:
    server, heavy_key, _ = guarded
    body = {"model": MODEL, "prompt": [5], "max_tokens": 1, "slo": {"ttft_ms": 60_000}}
    answer = server.post("/v1/completions", body, headers={"Authorization": f"Bearer {heavy_key}"})
    assert answer.status_code == 400 and "promises no latency" in answer.json()["error"]["message"]


def test_a_key_does_not_see_what_another_key_has_cached(guarded: tuple[RunningServer, str, str]) -> None:
    server, heavy_key, light_key = guarded

    def cached(key: str, prompt: list[int], salt: str | None = None) -> int:
        answer = server.client(key).completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    prompt = [token + 700 for token in range(64)]
    assert cached(heavy_key, prompt) == 0
    assert cached(heavy_key, prompt) >= 32
    assert cached(light_key, prompt) == 0
    assert cached(light_key, prompt) >= 32
    assert cached(light_key, prompt, "own") == 0


def test_names_of_keys_in_the_metrics_are_for_keys_that_may_see_them(
    guarded: tuple[RunningServer, str, str],
) -> None:
    server, heavy_key, _ = guarded
    server.client(heavy_key).completions.create(model=MODEL, prompt=[5, 6], max_tokens=1)
    wait_for(lambda: 'tenant="' in server.get("/metrics").text, "a tenant's series", server)
    for headers in ({}, {"Authorization": f"Bearer {heavy_key}"}):
        shown = server.get("/metrics", headers=headers).text
        assert 'tenant="key-1"' in shown and "heavy" not in shown and "light" not in shown
    seen = server.get("/metrics", headers={"Authorization": f"Bearer {server.operator_key}"}).text
    assert 'tenant="heavy"' in seen


def test_the_memory_plans_ratios_are_in_the_metrics(guarded: tuple[RunningServer, str, str]) -> None:
    server, _, _ = guarded
    for component in ("weights", "kv_cache"):
        assert 0.8 < server.sample("cumulo:ledger_predicted_over_measured", component=component) < 1.25
