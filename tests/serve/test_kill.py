"""`kill -9` of the engine under load: the server says so, brings it back, and answers every client, streams
included."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serve.kill import kill_engine
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
    "max_tokens": 1_600, "extra_body": {"ignore_eos": True},
}  # fmt: skip
SHORT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Count to ten."}], "temperature": 0, "max_tokens": 12,
}  # fmt: skip
BEGUN, WHOLE, QUEUED = 8, 4, 4


def test_every_client_is_answered() -> None:
    options = (quick_model(), "--max-running", str(BEGUN))
    with running_server(*options) as server, ThreadPoolExecutor(32) as threads:
        client = server.client()
        expected = client.chat.completions.create(**SHORT).choices[0].message.content
        story = client.chat.completions.create(**LONG).choices[0].message.content
        streams = [client.chat.completions.create(**LONG, stream=True) for _ in range(BEGUN)]
        begun = [next(stream) for stream in streams]
        # All places are taken: these have told their clients nothing yet.
        whole = [threads.submit(client.chat.completions.create, **SHORT) for _ in range(WHOLE)]
        queued = [threads.submit(read_whole_stream, client) for _ in range(QUEUED)]
        wait_for(
            lambda: server.sample("cumulo:num_requests_waiting") == WHOLE + QUEUED, "a full queue", server
        )
        ends = [threads.submit(read_to_the_end, *pair) for pair in zip(begun, streams, strict=True)]
        kill_engine(server)
        for end in ends:
            assert end.result() == story
        for answer in whole:
            assert answer.result().choices[0].message.content == expected
        for stream_text in queued:
            assert stream_text.result() == expected
        calls = [first.id for first in begun] + [answer.result().id for answer in whole]
        told = [server.get(f"/v1/requests/{call}/explain").json()["data"][0] for call in calls]
        assert any(one["retried_after_engine_restart"] for one in told)
        is_well(server)
        assert client.chat.completions.create(**SHORT).choices[0].message.content == expected


def read_to_the_end(first: Any, stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in (first, *stream))


def read_whole_stream(client: openai.OpenAI) -> str:
    chunks = client.chat.completions.create(**SHORT, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def is_well(server: RunningServer) -> None:
    health = server.get("/health").json()
    assert health["status"] == "ok" and health["restarts"] == 1
    assert "killed by SIGKILL" in health["detail"]
    wait_for(lambda: server.sample("cumulo:num_requests_running") == 0, "an idle engine", server)
    assert server.sample("cumulo:kv_cache_usage_perc") == 0
