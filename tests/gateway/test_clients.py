"""OpenAI's own client through the gateway sees what it sees at a server."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.gateway.running_gateway import RunningGateway, fleet_server, gateway_of, key_file
from tests.serve.running_server import RunningServer
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long
ASK = [{"role": "user", "content": "Tell me about the cat, the mat and the dog."}]
NOTE = {"type": "function", "function": {"name": "note", "parameters": {
    "type": "object", "properties": {"word": {"enum": ["cat", "dog"]}}, "required": ["word"],
}}}  # fmt: skip


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, list[RunningServer]]]:
    folder = tmp_path_factory.mktemp("fleet")
    model, key = save_tiny_model(folder), key_file(folder)
    with ExitStack() as stack:
        servers = [stack.enter_context(fleet_server(model, key)) for _ in range(2)]
        yield stack.enter_context(gateway_of(servers, key)), servers


@pytest.fixture(scope="module")
def client(fleet: tuple[RunningGateway, list[RunningServer]]) -> openai.OpenAI:
    return fleet[0].client()


def test_an_answer_is_the_servers_own(
    fleet: tuple[RunningGateway, list[RunningServer]], client: openai.OpenAI
) -> None:
    asked = dict(model=NAME, messages=ASK, max_tokens=12, temperature=0)
    through = client.chat.completions.create(**asked)
    direct = fleet[1][0].client().chat.completions.create(**asked)
    assert through.choices == direct.choices
    assert through.usage is not None and through.usage.completion_tokens == 12


def test_a_stream_has_no_trace_of_the_seals(
    client: openai.OpenAI, fleet: tuple[RunningGateway, object]
) -> None:
    body = {"model": NAME, "messages": ASK, "max_tokens": 12, "temperature": 0, "stream": True}
    raw = fleet[0].post("/v1/chat/completions", body)
    assert "\n: " not in raw.text and raw.text.endswith("data: [DONE]\n\n")
    assert "x-cumulo-prompt" not in raw.headers
    whole = client.chat.completions.create(**{**body, "stream": False})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**body))
    assert text == whole.choices[0].message.content


def test_tools_and_completions_pass(client: openai.OpenAI) -> None:
    called = client.chat.completions.create(
        model=NAME, messages=ASK, tools=[NOTE], tool_choice="required", max_tokens=60, temperature=0
    )
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["word"] in ("cat", "dog")
    several = client.completions.create(model=NAME, prompt=["a cat", "a dog"], max_tokens=4, n=2)
    assert len(several.choices) == 4


def test_the_same_prefix_goes_to_the_same_replica(fleet: tuple[RunningGateway, list[RunningServer]]) -> None:
    """The second of two long prompts with the same beginning is sent where the first was, and found there."""
    gateway, _ = fleet

    def asked(prompt: str) -> dict[str, Any]:
        answer = gateway.post("/v1/completions", {"model": NAME, "prompt": prompt, "max_tokens": 2}).json()
        return dict(gateway.get(f"/v1/requests/{answer['id']}/explain").json()["gateway"])

    # Where a prompt goes follows from measured speeds too, so the other replica may be cheaper in a slow moment.
    shared = "the cat sat on the mat and the dog saw that the cat was there. " * 10
    pairs = (tuple(asked(f"{number} {shared}{end}") for end in ("Once", "Twice")) for number in range(40))
    told = next(second for first, second in pairs if first["replicas"] == second["replicas"])
    routed = told["events"][0]
    assert routed["expected_cached_tokens"] > 100 and told["tokens"]["cached"] > 100
    assert routed["second"]["expected_cached_tokens"] == 0


def test_unknown_models_and_bad_requests_are_answered_as_by_a_server(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this gateway has 'tiny-random'"):
        client.chat.completions.create(model="gpt-9", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=NAME, messages=ASK, temperature=9)
    assert [model.id for model in client.models.list()] == [NAME]


def test_internal_paths_are_not_passed_on(fleet: tuple[RunningGateway, list[RunningServer]]) -> None:
    gateway, (server, _) = fleet
    assert gateway.get("/internal/fleet/state").status_code == 404
    assert server.get("/internal/fleet/state").status_code == 401
    forged = {"x-cumulo-fleet": '{"id":"00","created":1,"seed":1,"caller":{"name":"root"}}'}
    body = {"model": NAME, "messages": ASK, "max_tokens": 2}
    answer = gateway.post("/v1/chat/completions", body, headers=forged).json()
    assert answer["id"] != "chatcmpl-00" and answer["created"] > 1
    assert (
        server.post("/v1/chat/completions", body, headers={"x-cumulo-fleet-proof": "x" * 20}).status_code
        == 401
    )


def test_a_gateways_metrics_have_the_names_that_alerts_know(
    fleet: tuple[RunningGateway, list[RunningServer]],
) -> None:
    gateway, servers = fleet
    assert gateway.sample("cumulo:replica_up", model_name=NAME) == 2
    assert gateway.sample("cumulo:replica_up", replica=servers[0].url.removeprefix("http://")) == 1
    assert gateway.sample("cumulo:http_responses_total", model_name=NAME, status="200") >= 5
    assert gateway.sample("cumulo:http_responses_total", model_name="gpt-9") == 0
