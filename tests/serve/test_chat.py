"""/v1/chat/completions, asked by the official client."""

import asyncio
import math
from typing import Any

import openai
import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = needs_built_in_model
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}


def streamed_text(chunks: Any, index: int = 0) -> str:
    return "".join(
        choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index
    )


@pytest.mark.speaking
def test_a_question_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_answer_is_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True))
    assert streamed_text(chunks) == whole.choices[0].message.content
    assert len(chunks) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_in_a_last_chunk_without_choices(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(
        client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_n_answers_differ_and_are_numbered(client: openai.OpenAI) -> None:
    fields = GREEDY | {"temperature": 1.5, "n": 3, "seed": 11}
    answer = client.chat.completions.create(**fields)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    chunks = list(client.chat.completions.create(**fields, stream=True))
    for choice in answer.choices:
        assert streamed_text(chunks, choice.index) == choice.message.content


def test_the_same_seed_gives_the_same_answer(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(**(GREEDY | {"temperature": 1.3, "seed": seed}))
        return answer.choices[0].message.content

    assert ask(5) == ask(5)
    assert ask(5) != ask(6)


def test_requests_without_a_seed_are_not_all_alike(client: openai.OpenAI) -> None:
    fields = GREEDY | {"temperature": 1.5}
    texts = {client.chat.completions.create(**fields).choices[0].message.content for _ in range(3)}
    assert len(texts) > 1


@pytest.mark.speaking
def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY).choices[0].message.content or ""
    for stop in (" is", [" is", "never said"]):
        answer = client.chat.completions.create(**GREEDY, stop=stop)
        assert answer.choices[0].message.content == whole[: whole.index(" is")]
        assert answer.choices[0].finish_reason == "stop"
        assert streamed_text(client.chat.completions.create(**GREEDY, stop=stop, stream=True)) == (
            answer.choices[0].message.content
        )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_is_as_long_as_asked(client: openai.OpenAI, name: str) -> None:
    fields = {key: value for key, value in GREEDY.items() if key != "max_tokens"}
    answer = client.chat.completions.create(**fields, **{name: 4})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_log_probabilities_describe_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token  # greedy takes the likeliest
        assert math.isclose(entry.logprob, entry.top_logprobs[0].logprob, abs_tol=1e-4)
        assert 0 < sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001
    chunks = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


@pytest.mark.speaking
def test_a_bias_forces_and_forbids_tokens(client: openai.OpenAI, server: RunningServer) -> None:
    token = server.post("/tokenize", {"prompt": "The", "add_special_tokens": False}).json()["tokens"][0]
    first = client.chat.completions.create(**(GREEDY | {"max_tokens": 1}))
    assert first.choices[0].message.content == "The"
    fields = GREEDY | {"max_tokens": 1, "logit_bias": {str(token): -100}}
    assert client.chat.completions.create(**fields).choices[0].message.content != "The"
    fields = GREEDY | {"max_tokens": 4, "logit_bias": {str(token): 100}}
    assert client.chat.completions.create(**fields).choices[0].message.content == "TheTheTheThe"


def test_penalties_change_a_repetitive_answer(client: openai.OpenAI) -> None:
    fields = GREEDY | {"messages": [{"role": "user", "content": "Say: ha ha ha ha ha"}]}
    plain = client.chat.completions.create(**fields).choices[0].message.content
    for penalty in (
        {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 1.5}},
    ):  # fmt: skip
        penalised = client.chat.completions.create(**fields, **penalty)  # type: ignore[call-overload]
        assert penalised.choices[0].message.content != plain


def test_extensions_are_understood(client: openai.OpenAI) -> None:
    # top_k=1 is greedy whatever the temperature; ignore_eos and min_tokens go past the model's own end.
    greedy = client.chat.completions.create(**GREEDY).choices[0].message.content
    fields = GREEDY | {"temperature": 1.9}
    answer = client.chat.completions.create(**fields, extra_body={"top_k": 1, "min_p": 0.1, "priority": 1})
    assert answer.choices[0].message.content == greedy
    for past_the_end in ({"ignore_eos": True}, {"min_tokens": 24}):
        long = client.chat.completions.create(**GREEDY, extra_body=past_the_end)
        assert long.usage is not None and long.usage.completion_tokens == 24


def test_cached_prefixes_are_shared_within_a_salt_only(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = GREEDY | {
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "A long beginning. " * 20}],
    }

    def cached(salt: str) -> int:
        usage = client.chat.completions.create(**fields, extra_body={"cache_salt": salt}).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached("one") == 0
    assert cached("one") > 50
    assert cached("two") == 0


def test_content_may_come_in_parts_and_neutral_fields_may_be_there(client: openai.OpenAI) -> None:
    parts: list[Any] = [
        {
            "role": "developer",
            "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is the capital of France?"}],
            "name": "Ann",
        },
    ]
    answer = client.chat.completions.create(
        **(GREEDY | {"messages": parts}),
        user="someone", metadata={"a": "b"}, store=False, response_format={"type": "text"}, service_tier="auto",
        extra_body={"tools": None, "reasoning_effort": None},
    )  # fmt: skip
    assert (
        answer.choices[0].message.content
        == client.chat.completions.create(**GREEDY).choices[0].message.content
    )


@pytest.mark.long
def test_sixteen_streams_at_once_get_each_their_own_text(server: RunningServer) -> None:
    def fields(number: int) -> dict[str, Any]:
        return GREEDY | {"messages": [{"role": "user", "content": f"Count from {number}."}], "max_tokens": 16}

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(**fields(number), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def together() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    texts = asyncio.run(together())
    alone = server.client()
    for number in (0, 7, 15):
        answer = alone.chat.completions.create(**fields(number))
        assert answer.choices[0].message.content == texts[number]
