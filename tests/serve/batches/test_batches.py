"""/v1/batches asked by the official client: what it answers, what it refuses, and whom it lets pass."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.batches.help import CHAT, Bench, begin, chat, end_of, line, results
from tests.serve.running_server import running_server, wait_for
from tests.serve.tiny_model import NAME

pytestmark = pytest.mark.long

LONG = {"max_tokens": 400, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat("hello"),
    "/v1/completions": {"model": NAME, "prompt": "the cat", "max_tokens": 4, "temperature": 0},
    "/v1/embeddings": {"model": NAME, "input": ["the cat", "the mat", "a", "b", "c", "d"]},
    "/v1/responses": {"model": NAME, "input": "hello", "max_output_tokens": 16, "temperature": 0},
}


# -- what it answers ----------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_gives_the_answers_of_single_requests(bench: Bench, endpoint: str) -> None:
    client, body = bench.client(), BODIES[endpoint]
    lines = [line(f"good-{n}", body, endpoint) for n in range(20)]
    lines += ["", line("bad", {**body, "temperature": -1}, endpoint)]
    batch = begin(client, lines, endpoint)
    assert (
        batch.status == "validating" and batch.output_file_id is None and batch.metadata == {"for": "a test"}
    )
    ended = end_of(client, batch, bench.server)
    assert ended.status == "completed" and ended.errors is None and ended.completed_at
    assert ended.request_counts and ended.request_counts.to_dict() == {
        "total": 21,
        "completed": 20,
        "failed": 1,
    }
    good, bad = results(client, ended.output_file_id), results(client, ended.error_file_id)
    assert set(good) == {f"good-{n}" for n in range(20)} and set(bad) == {"bad"}
    direct = bench.server.post(
        endpoint, body, headers={"Authorization": f"Bearer {bench.keys['ann']}"}
    ).json()
    for one in good.values():
        assert one["id"].startswith("batch_req_") and one["error"] is None
        assert one["response"]["status_code"] == 200
        assert _content(one["response"]["body"]) == _content(direct)
    assert bad["bad"]["response"]["status_code"] == 400
    assert bad["bad"]["response"]["body"]["error"]["param"] == "temperature"


def _content(answer: dict[str, Any]) -> Any:
    if "output" in answer:
        return [part["text"] for item in answer["output"] for part in item.get("content", ())]
    if "data" in answer:
        return [item["embedding"] for item in answer["data"]]
    return [choice.get("message", {}).get("content") or choice.get("text") for choice in answer["choices"]]


def test_every_request_of_a_batch_has_a_story_of_its_own(bench: Bench) -> None:
    client = bench.client()
    ended = end_of(client, begin(client, [line("a", chat("tell"))]), bench.server)
    response = results(client, ended.output_file_id)["a"]["response"]
    assert response["request_id"] == response["body"]["id"]
    path = f"/v1/requests/{response['request_id']}/explain"
    stories = {
        name: bench.server.get(path, headers={"Authorization": f"Bearer {key}"})
        for name, key in bench.keys.items()
    }
    assert stories["ann"].json()["data"][0]["finish_reason"] in ("stop", "length")
    assert stories["bob"].status_code == 404
    assert bench.server.sample("cumulo:batches", status="completed") >= 1
    assert bench.server.sample("cumulo:batch_requests_total", outcome="completed") >= 1


def test_batches_are_listed_newest_first_and_page_by_page(bench: Bench) -> None:
    client = bench.client("bob")
    made = [begin(client, [line("a", chat("x"))]) for _ in range(3)]
    for batch in made:
        end_of(client, batch, bench.server)
    assert {batch.id for batch in client.batches.list(limit=2)} == {batch.id for batch in made}
    first = client.batches.list(limit=2)
    assert len(first.data) == 2 and first.has_more
    assert not client.batches.list(limit=2, after=first.data[-1].id).has_more


def test_the_output_is_a_file_like_others(bench: Bench) -> None:
    client = bench.client()
    ended = end_of(client, begin(client, [line("a", chat("x"))]), bench.server)
    assert ended.output_file_id and ended.error_file_id is None
    stored = client.files.retrieve(ended.output_file_id)
    assert stored.purpose == "batch_output" and stored.filename == f"{ended.id}_output.jsonl"
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(input_file_id=stored.id, endpoint=CHAT, completion_window="24h")
    client.files.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(stored.id)


# -- what it refuses ----------------------------------------------------------------------------------------------
def test_a_file_that_is_no_batch_fails_with_every_line_named(bench: Bench) -> None:
    client = bench.client()
    lines = [
        line("a", chat("x")),
        "{no json",
        line("a", chat("x")),
        line("b", chat("x"), method="GET"),
        line("c", chat("x"), url="/v1/completions"),
        line("d", chat("x", stream=True)),
        line("", chat("x")),
        json.dumps({"custom_id": "e", "method": "POST", "url": CHAT}),
        line("f", [1]),
        "[" * 5000,
    ]
    ended = end_of(client, begin(client, lines), bench.server)
    assert ended.status == "failed" and ended.output_file_id is None and ended.failed_at
    assert ended.errors and ended.errors.data
    told = {error.line: error.code for error in ended.errors.data}
    assert told == {
        2: "invalid_json_line", 3: "duplicate_custom_id", 4: "invalid_method", 5: "invalid_url",
        6: "invalid_request", 7: "invalid_custom_id", 8: "invalid_json_line", 9: "invalid_json_line",
        10: "invalid_json_line",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"input_file_id": 7}, "input_file_id"),
    ],
)
def test_a_wrong_field_is_named(bench: Bench, change: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file-0", "endpoint": CHAT, "completion_window": "24h"} | change
    answer = bench.server.post("/v1/batches", body, headers={"Authorization": f"Bearer {bench.keys['ann']}"})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param), answer.text


def test_other_keys_see_nothing_of_a_batch(bench: Bench) -> None:
    ann, bob = bench.client("ann"), bench.client("bob")
    ended = end_of(ann, begin(ann, [line("a", chat("x"))]), bench.server)
    assert ended.output_file_id
    with pytest.raises(openai.NotFoundError):
        bob.batches.retrieve(ended.id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.cancel(ended.id)
    with pytest.raises(openai.NotFoundError):
        bob.files.content(ended.output_file_id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.create(input_file_id=ended.input_file_id, endpoint=CHAT, completion_window="24h")
    assert ended.id not in {batch.id for batch in bob.batches.list(limit=100)}
    assert bench.server.get("/v1/batches").status_code == 401
    with pytest.raises(openai.BadRequestError, match="completed"):
        ann.batches.cancel(ended.id)


def test_a_batch_ends_where_its_key_may_store_no_more(tiny: Path, tmp_path: Path) -> None:
    with running_server(str(tiny), "--files", str(tmp_path / "files"), "--max-files-mib", "0.02") as server:
        client = server.client()
        batch = begin(client, [line(f"{n}", chat("x", max_tokens=1)) for n in range(60)])
        ended = end_of(client, batch, server)
        assert ended.status == "failed" and ended.errors and ended.errors.data
        (error,) = ended.errors.data
        assert error.code == "storage_full" and error.message and "delete files" in error.message
        done = results(client, ended.output_file_id)
        assert ended.request_counts and 0 < len(done) == ended.request_counts.completed < 60
        assert sum(one.stat().st_size for one in (tmp_path / "files").glob("*.data")) <= 0.02 * (1 << 20)
        with pytest.raises(openai.APIStatusError, match="delete files"):
            begin(client, [line("a", chat("x" * 5000))])


# -- how it runs --------------------------------------------------------------------------------------------------
def test_a_request_goes_before_a_running_batch(bench: Bench) -> None:
    """The batch fills every place of the engine; who comes now takes one from it."""
    client = bench.client()
    before = bench.server.sample("cumulo:preemptions_by_reason_total", reason="priority")
    batch = begin(client, [line(f"{n}", chat(f"x {n}", **LONG)) for n in range(200)])
    wait_for(lambda: bench.server.sample("cumulo:num_requests_running") == 4, "a full engine", bench.server)
    for number in range(8):
        client.chat.completions.create(**chat(f"now {number}"))
    running = client.batches.retrieve(batch.id)
    assert running.status == "in_progress" and running.request_counts
    assert running.request_counts.completed < 200
    with pytest.raises(openai.BadRequestError, match=batch.id):
        client.files.delete(batch.input_file_id)
    waiting = begin(client, [line("later", chat("x"))])  # of the same key: behind the first
    assert client.batches.cancel(waiting.id).status == "cancelled"
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = end_of(client, batch, bench.server)
    assert ended.status == "cancelled" and ended.cancelled_at and ended.request_counts
    done = results(client, ended.output_file_id)
    assert len(done) == ended.request_counts.completed < 200 and ended.error_file_id is None
    wait_for(lambda: bench.server.sample("cumulo:num_requests_running") == 0, "an idle engine", bench.server)
    # A preemption is counted when the preempted request ends.
    assert bench.server.sample("cumulo:preemptions_by_reason_total", reason="priority") > before
    client.files.delete(batch.input_file_id)


def test_a_batch_waits_out_the_limits_of_its_key(bench: Bench) -> None:
    client = bench.client("slow")
    refused = bench.server.sample("cumulo:http_responses_total", status="429")

    def came_up_against_it(*sizes: int) -> bool:
        lines = [
            line(f"{n}", {"model": NAME, "prompt": [5] * size, "max_tokens": 1}, "/v1/completions")
            for n, size in enumerate(sizes)
        ]
        ended = end_of(client, begin(client, lines, "/v1/completions"), bench.server)
        assert ended.request_counts and ended.request_counts.completed == len(sizes)
        return bench.server.sample("cumulo:http_responses_total", status="429") > refused

    if not came_up_against_it(*[500] * 12, 200):  # 6,200 of 6,000 tokens a minute
        # A slow machine took so long for them that the rest was refilled meanwhile; soon there is no more.
        wait_for(lambda: came_up_against_it(500), "a batch that waits", bench.server)


@pytest.mark.long
def test_a_batch_outlives_its_engine(bench: Bench) -> None:
    client = bench.client()
    restarts = bench.server.sample("cumulo:engine_restarts")
    batch = begin(client, [line(f"{n}", chat(f"x {n}", **(LONG | {"max_tokens": 100}))) for n in range(40)])

    def some_done() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed > 0

    wait_for(some_done, "the first answers", bench.server)
    os.kill(bench.server.engine_pid(), signal.SIGKILL)
    ended = end_of(client, batch, bench.server)
    assert bench.server.sample("cumulo:engine_restarts") == restarts + 1
    assert ended.request_counts and ended.request_counts.to_dict() == {
        "total": 40,
        "completed": 40,
        "failed": 0,
    }
    assert len(results(client, ended.output_file_id)) == 40


def test_the_description_has_files_and_batches(bench: Bench) -> None:
    paths = bench.server.get("/openapi.json").json()["paths"]
    assert set(paths["/v1/files"]) == {"get", "post"} and set(paths["/v1/files/{file_id}"]) == {
        "get",
        "delete",
    }
    assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]
    assert {"/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"} <= set(paths)
