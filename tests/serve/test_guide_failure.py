"""A guide that gives up in the middle of an answer ends that request, with an error that names its field."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = needs_built_in_model

# It compiles, but has so many readings that after a few letters the parser may not go on.
HOPELESS = {"type": "grammar", "grammar": 'start: a\na: "" | /[a-z]/ | a a | a a a'}
ASK: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 120, "temperature": 1.0,
    "seed": 3, "extra_body": {"response_format": HOPELESS, "min_tokens": 100},
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 30, "temperature": 0,
}  # fmt: skip


def test_it_is_the_requests_fault_and_said_so(server: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"the guide failed: .*[Tt]oo many items") as caught:
        client.chat.completions.create(**ASK)
    assert caught.value.param == "response_format"
    assert isinstance(caught.value.body, dict) and caught.value.body["type"] == "invalid_request_error"
    assert server.get("/health").json()["restarts"] == 0


def test_a_stream_ends_with_the_same_error(client: openai.OpenAI) -> None:
    read = []
    with pytest.raises(openai.APIError, match="the guide failed") as caught:
        for chunk in client.chat.completions.create(**ASK, stream=True):
            read.append(chunk)
    assert len(read) > 2
    assert caught.value.param == "response_format" and caught.value.type == "invalid_request_error"


def test_others_in_the_same_steps_do_not_notice(server: RunningServer, client: openai.OpenAI) -> None:
    alone = client.chat.completions.create(**PLAIN).choices[0].message.content
    with ThreadPoolExecutor() as threads:
        beside = [threads.submit(client.chat.completions.create, **PLAIN) for _ in range(3)]
        failing = threads.submit(client.chat.completions.create, **ASK)
        assert isinstance(failing.exception(), openai.BadRequestError)
        assert [answer.result().choices[0].message.content for answer in beside] == [alone] * 3
