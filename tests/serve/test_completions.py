"""/v1/completions, asked by the official client; the engine in this process is the oracle."""

import asyncio
from typing import Any

import openai
import pytest

from cumulo import LLM, SamplingParams
from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model, quick_model

pytestmark = needs_built_in_model
PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def llm() -> Any:
    from cumulo.engine.config import EngineConfig

    with LLM(quick_model(), config=EngineConfig(threads=1, kv_memory_gib=0.1)) as llm:
        yield llm


def test_the_server_says_what_the_engine_says(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))[0]
    answer = client.completions.create(**GREEDY)
    assert answer.choices[0].text == expected.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    sampled = llm.generate(PROMPT, SamplingParams(temperature=1.2, top_p=1, max_tokens=8, seed=3))[0]
    again = client.completions.create(**(GREEDY | {"temperature": 1.2, "seed": 3}))
    assert again.choices[0].text == sampled.text


def test_tokens_are_a_prompt_too(client: openai.OpenAI, llm: LLM) -> None:
    tokens = llm.tokenizer.encode(PROMPT, add_special=True)
    answer = client.completions.create(**(GREEDY | {"prompt": tokens}))
    assert answer.choices[0].text == client.completions.create(**GREEDY).choices[0].text


def test_several_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "Two plus two is", "The sky is"]
    answer = client.completions.create(**(GREEDY | {"prompt": prompts, "n": 2}))
    assert [choice.index for choice in answer.choices] == list(range(6))
    texts = {}
    for chunk in client.completions.create(**(GREEDY | {"prompt": prompts, "n": 2}), stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    for position, prompt in enumerate(prompts):
        alone = client.completions.create(**(GREEDY | {"prompt": prompt})).choices[0].text
        assert answer.choices[2 * position].text == answer.choices[2 * position + 1].text == alone
        assert texts[2 * position] == alone


def test_sixteen_tokens_unless_asked_otherwise(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_log_probabilities_stand_in_columns(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, logprobs=2))[0].samples[0]
    choice = client.completions.create(**GREEDY, logprobs=2).choices[0]
    columns = choice.logprobs
    assert columns is not None and columns.tokens and columns.token_logprobs and columns.text_offset
    assert "".join(columns.tokens) == choice.text
    assert columns.token_logprobs == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-3)
    for offset, token in zip(columns.text_offset, columns.tokens, strict=True):
        assert choice.text[offset : offset + len(token)] == token


def test_echo_gives_the_prompt_and_its_log_probabilities(client: openai.OpenAI, llm: LLM) -> None:
    """What evaluation harnesses ask: the log-probability of a given text, nothing generated."""
    answer = client.completions.create(**(GREEDY | {"max_tokens": 0}), echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == PROMPT
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=1))[0].prompt_logprobs
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None and expected is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx([e.logprob for e in expected], abs=1e-3)
    assert "".join(choice.logprobs.tokens or []) == PROMPT
    longer = client.completions.create(**GREEDY, echo=True)
    assert longer.choices[0].text == PROMPT + client.completions.create(**GREEDY).choices[0].text


def test_the_best_of_several_is_returned(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, top_p=1, max_tokens=8, seed=9, n=1, best_of=4)
    expected = llm.generate(PROMPT, params)[0].text
    answer = client.completions.create(**(GREEDY | {"temperature": 1.5, "seed": 9}), best_of=4)
    assert [choice.text for choice in answer.choices] == [expected]


def test_the_asynchronous_client_streams(server: RunningServer, client: openai.OpenAI) -> None:
    async def ask() -> str:
        async with server.async_client() as asynchronous:
            stream = await asynchronous.completions.create(**GREEDY, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(ask()) == client.completions.create(**GREEDY).choices[0].text
