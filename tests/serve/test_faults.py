"""The server at 3 a.m.: engines killed and stopped, clients gone, signals. Real processes, real signals."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.serve.http.raw import Client, post
from tests.serve.running_server import (
    MODEL,
    RunningServer,
    needs_built_in_model,
    quick_model,
    running_server,
    wait_for,
)

pytestmark = [needs_built_in_model, pytest.mark.long]
LONG: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Tell a long story."}], "temperature": 0,
    "max_tokens": 4000, "extra_body": {"ignore_eos": True},
}  # fmt: skip
SHORT: dict[str, Any] = LONG | {"max_tokens": 40}
# Long enough for a quick model to be killed in the middle of them.
TALE: dict[str, Any] = LONG | {"max_tokens": 300}
STORY: dict[str, Any] = LONG | {"max_tokens": 400}


def begin_stream(client: openai.OpenAI, fields: dict[str, Any]) -> tuple[Any, Any]:
    """A stream of which the first token has come."""
    stream = client.chat.completions.create(**fields, stream=True)
    return stream, next(iter(stream))


# A long answer of each of the other two APIs, and what says that it is complete.
WORDS: dict[str, Any] = {"type": "array", "items": {"enum": ["word"]}, "minItems": 150, "maxItems": 150}
OTHER_STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/responses": (
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": WORDS}}},
        "response.completed",
    ),
    "/v1/messages": (
        {
            "max_tokens": 4000,
            "messages": [{"role": "user", "content": "Hi"}],
            "output_config": {"format": {"type": "json_schema", "schema": WORDS}},
        },
        "message_stop",
    ),
}


def begin_events(server: RunningServer, path: str) -> Iterator[str]:
    """The lines of a stream of which the first has come."""
    client = httpx.Client(timeout=300)
    body = {"model": MODEL, "stream": True, **OTHER_STREAMS[path][0]}
    lines = client.send(client.build_request("POST", server.url + path, json=body), stream=True).iter_lines()
    assert next(lines).startswith("event: ")
    return lines


def text_of(*chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def engine_is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")  # noqa: PTH110


def five_in_mid_answer(server: RunningServer, threads: ThreadPoolExecutor, engine: int) -> Any:
    """Three streams and two answers that are not streamed, which have told their clients nothing yet. The engine
    stands still then, so that none ends before the fault. None: one has, because we had to wait for our turn."""

    def ended() -> float:
        return server.sample("cumulo:request_success_total")

    def five_run() -> bool:
        return server.sample("cumulo:num_requests_running") == 5

    client, before = server.client(), ended()
    stream, first = begin_stream(client, STORY)
    others = {path: begin_events(server, path) for path in OTHER_STREAMS}
    whole = [threads.submit(client.chat.completions.create, **TALE) for _ in range(2)]
    wait_for(lambda: five_run() or ended() > before, "five running", server)
    os.kill(engine, signal.SIGSTOP)
    if five_run():
        return stream, first, others, whole
    os.kill(engine, signal.SIGCONT)
    for one in (stream, *others.values(), *(answer.result() for answer in whole)):
        list(one)
    return None


def new_engine(server: RunningServer, old: int) -> int | None:
    with contextlib.suppress(AssertionError):  # there is none for a moment
        return pid if (pid := server.engine_pid()) != old else None
    return None


@pytest.fixture(scope="module")
def hurt() -> Any:
    """For tests after which the server has a new engine."""
    with running_server(quick_model(), "--no-console", "--stall-timeout", "6") as server:
        yield server


def test_a_killed_engine_is_replaced_and_everyone_is_answered(hurt: RunningServer) -> None:
    server = hurt
    with ThreadPoolExecutor() as threads:
        client = server.client()
        expected = client.chat.completions.create(**TALE).choices[0].message.content
        story = client.chat.completions.create(**STORY).choices[0].message.content
        engine = server.engine_pid()
        while not (five := five_in_mid_answer(server, threads, engine)):
            pass
        stream, first, others, whole = five
        os.kill(engine, signal.SIGKILL)
        next_engine = wait_for(lambda: new_engine(server, engine), "another engine", server)
        os.kill(next_engine, signal.SIGSTOP)  # until everybody has seen that there is none
        assert server.status("/health") == 503
        assert server.get("/health").json()["engine"] == "restarting"
        with pytest.raises(openai.InternalServerError, match="being restarted"):
            client.chat.completions.create(**SHORT)
        os.kill(next_engine, signal.SIGCONT)
        assert text_of(first, *stream) == story
        for path, lines in others.items():
            assert f"event: {OTHER_STREAMS[path][1]}" in list(lines)
        for answer in whole:
            assert answer.result().choices[0].message.content == expected
        wait_for(lambda: server.status("/health") == 200, "health", server)
        assert client.chat.completions.create(**TALE).choices[0].message.content == expected
        calls = [first.id, *(answer.result().id for answer in whole)]
        told = [server.get(f"/v1/requests/{call}/explain").json()["data"][0] for call in calls]
        assert any(one["retried_after_engine_restart"] for one in told)
        assert server.sample("cumulo:engine_restarts") == 1


@pytest.mark.long
def test_an_engine_that_stands_still_is_replaced(hurt: RunningServer) -> None:
    client = hurt.client()
    story = client.chat.completions.create(**STORY).choices[0].message.content
    stream, first = begin_stream(client, STORY)
    stuck = hurt.engine_pid()
    os.kill(stuck, signal.SIGSTOP)
    wait_for(lambda: hurt.status("/health") == 503, "a bad /health", hurt)
    assert "finished no step for 6 s although it had work" in hurt.get("/health").text
    assert text_of(first, *stream) == story
    wait_for(lambda: hurt.status("/health") == 200, "health", hurt)
    assert engine_is_gone(stuck)
    assert client.chat.completions.create(**SHORT).usage is not None


def test_an_idle_engine_that_stops_for_a_while_is_left_alone(hurt: RunningServer) -> None:
    pid = hurt.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(6.5)  # longer than the stall timeout
    assert hurt.get("/health").status_code == 200
    os.kill(pid, signal.SIGCONT)
    assert hurt.client().chat.completions.create(**SHORT).usage is not None
    assert hurt.engine_pid() == pid


@pytest.fixture(scope="module")
def sturdy() -> Any:
    """For tests after which a server goes on as before."""
    with running_server(quick_model(), "--max-running", "1", "--max-queue", "1") as server:
        yield server


def nothing_is_left(server: RunningServer) -> Callable[[], bool]:
    return lambda: (
        server.sample("cumulo:num_requests_running") == server.sample("cumulo:num_requests_waiting") == 0
        and server.sample("cumulo:kv_cache_usage_perc") == 0
    )


def asked(server: RunningServer, more: dict[str, Any]) -> Client:
    """A connection on which a long answer is asked for, and no part of it is read."""
    body = {name: value for name, value in LONG.items() if name != "extra_body"} | more
    client = Client(server.url)
    client.send(post(json.dumps(body).encode(), "/v1/chat/completions", "Content-Type: application/json"))
    return client


def test_a_client_that_hangs_up_frees_its_place(sturdy: RunningServer) -> None:
    client = sturdy.client()
    before = sturdy.sample("cumulo:request_success_total", finished_reason="abort")
    stream, _ = begin_stream(client, LONG)
    stream.close()
    wait_for(nothing_is_left(sturdy), "the end of the streamed request", sturdy)
    with asked(sturdy, LONG["extra_body"]):
        wait_for(lambda: sturdy.sample("cumulo:num_requests_running") == 1, "it to run", sturdy)
    wait_for(nothing_is_left(sturdy), "the end of the other request", sturdy)
    assert sturdy.sample("cumulo:request_success_total", finished_reason="abort") == before + 2


def test_a_client_that_hangs_up_in_the_queue_frees_its_place(sturdy: RunningServer) -> None:
    client = sturdy.client()
    stream, _ = begin_stream(client, LONG)
    with asked(sturdy, {"stream": True}):
        wait_for(lambda: sturdy.sample("cumulo:num_requests_waiting") == 1, "it to wait", sturdy)
    wait_for(lambda: sturdy.sample("cumulo:num_requests_waiting") == 0, "an empty queue", sturdy)
    assert sturdy.sample("cumulo:num_requests_running") == 1
    stream.close()
    wait_for(nothing_is_left(sturdy), "the end of the first request", sturdy)


def test_a_full_queue_is_429_with_a_time_to_come_again(sturdy: RunningServer) -> None:
    client = sturdy.client()
    first, _ = begin_stream(client, LONG)  # runs
    with ThreadPoolExecutor() as threads:
        second = threads.submit(client.chat.completions.create, **SHORT)  # waits
        wait_for(lambda: sturdy.sample("cumulo:num_requests_waiting") == 1, "one waiting", sturdy)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**SHORT)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        first.close()
        answer = second.result()
    assert answer.usage is not None and answer.usage.completion_tokens == 40
    story = sturdy.get(f"/v1/requests/{answer.id}/explain").json()["data"][0]
    assert "slots in use" in story["summary"] and story["times_ms"]["queued"] > 0
    assert sturdy.sample("cumulo:wait_seconds_total", reason="slots") > 0
