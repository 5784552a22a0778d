"""/v1/messages, asked by Anthropic's own client."""

import asyncio
from typing import Any, Literal

import pydantic
import pytest

from tests import peers
from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]

QUESTION = "What is the capital of France?"
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 24,
    "messages": [{"role": "user", "content": QUESTION}],
    **GREEDY,
}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def claude(server: RunningServer) -> Any:
    return peers.anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)


def test_a_message_is_answered_like_a_chat_and_its_story_is_found(server: RunningServer, claude: Any) -> None:
    message = claude.messages.create(**ASK, system=[{"type": "text", "text": "Be brief."}])
    chat = server.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=24,
    )
    assert chat.usage is not None
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == chat.choices[0].message.content
    assert message.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[chat.choices[0].finish_reason]
    assert message.usage.output_tokens == chat.usage.completion_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert message.id.startswith("msg_") and message._request_id == message.id
    assert server.get(f"/v1/requests/{message.id}/explain").json()["id"] == message.id


def test_a_stream_tells_the_same_message_in_anthropics_order(server: RunningServer, claude: Any) -> None:
    whole = claude.messages.create(**ASK)
    with claude.messages.stream(**ASK) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 3 and "".join(texts) == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    body = {key: value for key, value in ASK.items() if key != "extra_body"} | {"stream": True}
    lines = server.post("/v1/messages", body).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}


@pytest.mark.long
@pytest.mark.speaking
@pytest.mark.parametrize("result", ["sunny, 21 degrees", [{"type": "text", "text": "sunny, 21 degrees"}]])
def test_a_tool_is_called_and_its_result_is_read(claude: Any, result: Any) -> None:
    with claude.messages.stream(
        **ASK | {"max_tokens": 60}, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}
    ) as stream:
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use"
    call = called.content[-1]
    assert call.type == "tool_use" and call.id.startswith("toolu_") and call.name == "weather"
    assert call.input in ({"city": "Paris"}, {"city": "Rome"})
    messages: Any = [
        *ASK["messages"],
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}]},
    ]
    answer = claude.messages.create(
        **ASK | {"messages": messages}, tools=[WEATHER], tool_choice={"type": "none"}
    )
    assert answer.stop_reason in ("end_turn", "max_tokens") and "sunny" in answer.content[0].text.lower()


def test_any_tool_without_parallel_use_is_one_call(claude: Any) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    called = claude.messages.create(**ASK | {"max_tokens": 60}, tools=[WEATHER], tool_choice=choice)
    assert [block.type for block in called.content] == ["tool_use"]


@pytest.mark.speaking
def test_a_call_that_is_cut_gives_what_there_is_of_it(claude: Any) -> None:
    long = {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 200}},
        "required": ["text"],
    }
    cut = claude.messages.create(
        **ASK | {"max_tokens": 30},
        tools=[{"name": "write", "input_schema": long}],
        tool_choice={"type": "any"},
    )
    assert cut.stop_reason == "max_tokens" and cut.content[0].type == "tool_use"
    assert isinstance(cut.content[0].input, dict)


def test_a_stop_sequence_is_named(claude: Any) -> None:
    whole = claude.messages.create(**ASK).content[0].text
    word = whole.split()[2]
    stopped = claude.messages.create(**ASK, stop_sequences=["\u2603", word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == whole[: whole.index(word)]


def test_an_answer_continues_the_last_message(claude: Any) -> None:
    whole = claude.messages.create(**ASK).content[0].text
    begun = whole[: whole.index(" ", 8)]
    messages = [*ASK["messages"], {"role": "assistant", "content": begun}]
    continued = claude.messages.create(**ASK | {"messages": messages})
    assert (begun + continued.content[0].text).startswith(whole[: len(begun) + 12])


def test_an_answer_has_the_form_it_was_asked_for(claude: Any) -> None:
    class Answer(pydantic.BaseModel):
        city: Literal["Paris", "Rome"]

    parsed = claude.messages.parse(**ASK, output_format=Answer).parsed_output
    assert isinstance(parsed, Answer)
    with claude.messages.stream(**ASK, output_format=Answer) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Answer)


def test_tokens_are_counted_as_they_are_used(claude: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK["messages"], "system": "Hi.", "tools": [WEATHER]}
    counted = claude.messages.count_tokens(**asked).input_tokens
    used = claude.messages.create(**asked, max_tokens=1).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens > 40


def test_the_async_client_streams(server: RunningServer, claude: Any) -> None:
    async def ask() -> str:
        async with (
            peers.anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client,
            client.messages.stream(**ASK) as stream,
        ):
            return str(await stream.get_final_text())

    assert asyncio.run(ask()) == claude.messages.create(**ASK).content[0].text


USER: dict[str, Any] = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"messages": []}, "'messages'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "text only; 'image' blocks are not supported"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "no tool_use block with the id 'toolu_1'"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "belong to messages of the role assistant"),
        ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "send their results"),
        ({"messages": [{"role": "user", "content": []}]}, "nothing to answer"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no 'web_search_20250305' tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "not among the tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "'tool_choice.name' is missing"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "frob"}}}}, "frob"),
        ({"stop_sequence": ["x"]}, "did you mean 'stop_sequences'?"),
    ],
)
def test_what_cannot_be_is_refused_in_anthropics_shape(
    server: RunningServer, change: Any, words: str, stream: bool
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [USER], "stream": stream} | change
    response = server.post("/v1/messages", body)
    answer = response.json()
    assert response.status_code == 400, answer
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert words in answer["error"]["message"]
    assert answer["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def test_errors_are_the_clients_exceptions(server: RunningServer, claude: Any) -> None:
    with pytest.raises(peers.anthropic.NotFoundError, match="is not served here") as caught:
        claude.messages.create(**ASK | {"model": "claude"})
    assert caught.value.type == "not_found_error" and caught.value.request_id.startswith("req_")
    with pytest.raises(peers.anthropic.BadRequestError, match="context holds"):
        claude.messages.create(**ASK | {"messages": [{"role": "user", "content": "word " * 20_000}]})
    with pytest.raises(peers.anthropic.APIStatusError) as caught:
        claude.messages.create(**ASK | {"messages": [{"role": "user", "content": "x" * (5 << 20)}]})
    assert caught.value.status_code == 413 and caught.value.body["error"]["type"] == "request_too_large"
    for response, status in (
        (server.get("/v1/messages/batches"), 404),
        (server.get("/v1/messages"), 405),
        (server.post("/v1/messages/count_tokens", "text"), 400),
    ):
        assert response.status_code == status and response.json()["type"] == "error"
