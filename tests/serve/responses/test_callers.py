"""Several callers of one server: whose responses are whose, what is kept, and errors that the gate gives."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from cumulo.serve.access.keys import new_key
from tests.serve.running_server import RunningServer, running_server
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long

ASK: dict[str, Any] = {"model": NAME, "input": "the cat", "temperature": 0, "max_output_tokens": 4}
CONTEXT = 512


class Guarded:
    def __init__(self, server: RunningServer, keys: dict[str, str]) -> None:
        self.server, self.keys = server, keys

    def __getitem__(self, name: str) -> openai.OpenAI:
        return self.server.client(self.keys[name])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    path = folder / "keys.json"
    keys = {name: new_key(path, name) for name in ("ann", "bob", "eve")}
    keys["slow"] = new_key(path, "slow", requests_per_minute=1)
    model = save_tiny_model(folder, CONTEXT)
    options = ("--api-keys", str(path), "--stored-responses", "3", "--no-console")
    with running_server(str(model), *options) as server:
        yield Guarded(server, keys)


def test_nobody_reads_continues_or_deletes_anothers_response(guarded: Guarded) -> None:
    anns = guarded["ann"].responses.create(**ASK)
    for refused in (
        lambda: guarded["bob"].responses.retrieve(anns.id),
        lambda: guarded["bob"].responses.delete(anns.id),
        lambda: guarded["bob"].responses.input_items.list(anns.id),
        lambda: guarded["bob"].responses.create(**ASK, previous_response_id=anns.id),
        lambda: guarded["bob"].responses.create(**ASK, previous_response_id=anns.id, stream=True),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            refused()
        # Not a word that would tell it from one that never was.
        unknown = anns.id[:-4] + "0000"
        with pytest.raises(openai.NotFoundError) as never:
            guarded["bob"].responses.retrieve(unknown)
        assert caught.value.message.replace(anns.id, "ID") == never.value.message.replace(unknown, "ID")
    assert (
        guarded["ann"].responses.create(**ASK, previous_response_id=anns.id).previous_response_id == anns.id
    )


def test_the_newest_are_kept_and_a_flood_pushes_out_its_own(guarded: Guarded) -> None:
    bobs = guarded["bob"].responses.create(**ASK)
    eves = [guarded["eve"].responses.create(**ASK).id for _ in range(6)]
    assert guarded["bob"].responses.retrieve(bobs.id).id == bobs.id
    assert guarded["eve"].responses.retrieve(eves[-1]).id == eves[-1]
    with pytest.raises(openai.NotFoundError, match="keeps the newest 3"):
        guarded["eve"].responses.create(**ASK, previous_response_id=eves[0])


def test_a_conversation_too_long_is_cut_if_asked(guarded: Guarded) -> None:
    items: Any = [{"role": "system", "content": "the mat"}]
    for turn in range(40):
        items += [{"role": "user", "content": "the cat sat on the mat " * 4}]
        items += [{"type": "function_call", "call_id": f"c{turn}", "name": "f", "arguments": "{}"}]
        items += [{"type": "function_call_output", "call_id": f"c{turn}", "output": "the dog"}]
    items += [{"role": "user", "content": "the end"}]
    fields: Any = ASK | {"input": items}
    with pytest.raises(openai.BadRequestError, match="context"):
        guarded["ann"].responses.create(**fields)
    cut = guarded["ann"].responses.create(**fields, truncation="auto")
    assert cut.usage is not None and CONTEXT * 0.75 < cut.usage.input_tokens < CONTEXT
    alone: Any = ASK | {"input": "the cat " * 2_000}
    with pytest.raises(openai.BadRequestError, match="context"):
        guarded["ann"].responses.create(**alone, truncation="auto")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_the_gates_errors_have_anthropics_shape_too(guarded: Guarded, path: str) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2}
    if path.endswith("count_tokens"):
        del body["max_tokens"]
    post = guarded.server.post
    refused = post(path, body, headers={"x-api-key": "wrong"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert refused.json()["request_id"] == refused.headers["request-id"]
    good = post(path, body, headers={"x-api-key": guarded.keys["ann"], "anthropic-version": "2023-06-01"})
    assert good.status_code == 200, good.text


def test_anthropics_client_meets_its_own_exceptions(guarded: Guarded) -> None:
    anthropic = pytest.importorskip("anthropic")
    ask: Any = {"model": NAME, "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2}

    def client(key: str) -> Any:
        return anthropic.Anthropic(base_url=guarded.server.url, api_key=key, max_retries=0)

    with pytest.raises(anthropic.AuthenticationError):
        client("wrong").messages.create(**ask)
    assert client(guarded.keys["slow"]).messages.create(**ask).stop_reason
    with pytest.raises(anthropic.RateLimitError) as caught:
        client(guarded.keys["slow"]).messages.create(**ask)
    assert caught.value.type == "rate_limit_error" and int(caught.value.response.headers["retry-after"]) > 0
