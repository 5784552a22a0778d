"""/v1/completions, asked by the official client: log-probabilities in columns, echoed streams, token ids, beams."""

from typing import Any

import openai
import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model, quick_model

pytestmark = [needs_built_in_model, pytest.mark.long]
PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 6}
EMOJI = "Say 😀 🇫🇷 你好: 😀"


def chunks_of(client: openai.OpenAI, fields: dict[str, Any]) -> list[Any]:
    return list(client.completions.create(**fields, stream=True))


def choice_from(chunks: list[Any], index: int = 0) -> tuple[str, dict[str, list[Any]], str | None]:
    """A choice's text, its columns and why it ended, put together from a stream."""
    text, columns, reason = "", dict[str, list[Any]](), None
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index == index:
                assert reason is None, "nothing comes behind the end"
                text, reason = text + choice.text, choice.finish_reason
                if choice.logprobs is not None:
                    for name, column in choice.logprobs.model_dump().items():
                        columns.setdefault(name, []).extend(column)
    return text, columns, reason


def test_the_drawn_token_is_always_among_the_alternatives(client: openai.OpenAI) -> None:
    fields = GREEDY | {"temperature": 2, "seed": 5, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    for top in (0, 2):
        columns = client.completions.create(**fields, logprobs=top).choices[0].logprobs
        assert columns is not None and columns.tokens and columns.token_logprobs and columns.top_logprobs
        sizes = set()
        for token, logprob, table in zip(
            columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True
        ):
            assert table[token] == logprob
            sizes.add(len(table))
        assert sizes == ({1} if top == 0 else {top, top + 1}), "at this temperature some draws are unlikely"


def test_parts_of_characters_are_told_apart_and_have_offsets_in_the_text(client: openai.OpenAI) -> None:
    fields = GREEDY | {"prompt": EMOJI, "logprobs": 3, "max_tokens": 12}
    choice = client.completions.create(**fields, echo=True).choices[0]
    columns = choice.logprobs
    assert columns is not None and columns.tokens and columns.text_offset and columns.top_logprobs
    assert any(token.startswith("bytes:") for token in columns.tokens)
    assert not any("�" in token for table in columns.top_logprobs for token in table or ())
    assert all(len(table) >= 3 for table in columns.top_logprobs[1:])
    assert columns.text_offset == sorted(columns.text_offset) and columns.text_offset[-1] < len(choice.text)
    for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[offset : offset + len(token)] == token


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": EMOJI},
        {"prompt": EMOJI, "echo": True},
        {"prompt": [PROMPT, EMOJI], "n": 2, "echo": True, "temperature": 1, "seed": 3},
        {"stop": ["is", "."], "max_tokens": 24},
        {"stop": ["Paris. The"], "max_tokens": 12, "extra_body": {"include_stop_str_in_output": True}},
        {"echo": True, "max_tokens": 0},
        {"extra_body": {"ignore_eos": True, "skip_special_tokens": False}, "max_tokens": 24},
    ],
)
def test_a_stream_has_the_text_and_the_columns_of_the_whole_answer(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    asked = GREEDY | {"logprobs": 2} | fields
    whole = client.completions.create(**asked)
    chunks = chunks_of(client, asked | {"stream_options": {"include_usage": True}})
    for choice in whole.choices:
        text, columns, reason = choice_from(chunks, choice.index)
        assert choice.logprobs is not None
        assert (text, columns, reason) == (choice.text, choice.logprobs.model_dump(), choice.finish_reason)
        assert all(0 <= offset <= len(text) for offset in columns["text_offset"])
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_tokens_of_a_stop_string_are_not_told(client: openai.OpenAI) -> None:
    free = client.completions.create(**GREEDY, logprobs=0).choices[0]
    stop = free.text[-4:]
    cut = client.completions.create(**GREEDY, logprobs=0, stop=stop).choices[0]
    assert cut.finish_reason == "stop" and cut.text == free.text[: free.text.index(stop)]
    assert cut.logprobs is not None and cut.logprobs.tokens and cut.logprobs.text_offset
    assert "".join(cut.logprobs.tokens).startswith(cut.text)
    assert max(cut.logprobs.text_offset) < len(cut.text)


def test_a_prompt_is_echoed_as_it_was_sent(client: openai.OpenAI, server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": EMOJI}).json()["tokens"]
    for prompt in (EMOJI, ids, [EMOJI, PROMPT]):
        fields = GREEDY | {"prompt": prompt, "max_tokens": 2}
        chunks = chunks_of(client, fields | {"echo": True})
        plain = client.completions.create(**fields)
        for choice in plain.choices:
            prompt_text = PROMPT if choice.index else EMOJI
            assert choice_from(chunks, choice.index)[0] == prompt_text + choice.text
    best = client.completions.create(**GREEDY | {"temperature": 1, "seed": 1}, echo=True, best_of=3)
    assert best.choices[0].text.startswith(PROMPT)


def test_token_ids_come_with_the_answer(client: openai.OpenAI, server: RunningServer) -> None:
    prompt_ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    fields = GREEDY | {"n": 2, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    whole: Any = client.completions.create(**fields)
    assert [choice.prompt_token_ids for choice in whole.choices] == [prompt_ids] * 2
    ids = whole.choices[0].token_ids
    assert len(ids) == 6
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == whole.choices[0].text
    streamed: dict[int, list[int]] = {0: [], 1: []}
    prompts = []
    for chunk in chunks_of(client, fields):
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids
            prompts += [choice.prompt_token_ids] if hasattr(choice, "prompt_token_ids") else []
    assert streamed == {choice.index: choice.token_ids for choice in whole.choices}
    assert prompts == [prompt_ids] * 2
    assert not hasattr(client.completions.create(**GREEDY).choices[0], "token_ids")


def test_prompt_log_probabilities_are_those_of_an_echo(client: openai.OpenAI, server: RunningServer) -> None:
    echoed = client.completions.create(**GREEDY | {"max_tokens": 0}, echo=True, logprobs=0).choices[0]
    answer: Any = client.completions.create(**GREEDY, extra_body={"prompt_logprobs": 2})
    first, *tables = answer.choices[0].prompt_logprobs
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    assert first is None and len(tables) == len(ids) - 1
    assert echoed.logprobs is not None and echoed.logprobs.token_logprobs is not None
    for token, table, logprob in zip(ids[1:], tables, echoed.logprobs.token_logprobs[1:], strict=True):
        assert table[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert len(table) in (2, 3) and {entry["rank"] for entry in table.values()} >= {1, 2}
    alone: Any = client.completions.create(**GREEDY | {"max_tokens": 0}, extra_body={"prompt_logprobs": 0})
    assert alone.choices[0].text == "" and alone.usage is not None and alone.usage.completion_tokens == 0


def test_counts_come_with_every_chunk_when_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(client, GREEDY | {"stream_options": options, "extra_body": {"ignore_eos": True}})
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-2:] == [6, 6]
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_beams_are_those_of_the_engine(client: openai.OpenAI) -> None:
    from cumulo import LLM
    from cumulo.engine.config import EngineConfig

    with LLM(quick_model(), config=EngineConfig(threads=1, kv_memory_gib=0.1)) as llm:
        expected = llm.beam_search(PROMPT, width=3, max_tokens=6, length_penalty=0.5)[0]
    search = {"use_beam_search": True, "length_penalty": 0.5}
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "n": 3, "extra_body": search}
    answer = client.completions.create(**fields)
    assert [choice.text for choice in answer.choices] == [sample.text for sample in expected.samples]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(sample.token_ids) for sample in expected.samples)
    chunks = chunks_of(client, fields)
    assert [choice_from(chunks, index)[0] for index in range(3)] == [choice.text for choice in answer.choices]
    best = fields | {"n": 1, "extra_body": {"beam_width": 3, "length_penalty": 0.5}}
    assert client.completions.create(**best).choices[0].text == answer.choices[0].text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 51}, "beam_width"),
        ({"beam_width": 2, "use_beam_search": False}, "beam_width"),
        ({"beam_width": 2, "stop": "x"}, "stop"),
        ({"beam_width": 2, "logprobs": 1}, "logprobs"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": [1, 2, 1_000_000]}, "prompt"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"stop_token_ids": [1_000_000]}, "stop_token_ids"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"n": 129}, "n"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    server: RunningServer, change: dict[str, Any], param: str
) -> None:
    answer = server.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2} | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
