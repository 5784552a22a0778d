"""Variables for chat templates, and the server's own limit on answers: a tiny model with a template that thinks."""

from typing import Any

import openai
import pytest

from cumulo.serve.model_text import ModelText
from tests.serve.openai.conftest import DEFAULT_MAX_TOKENS
from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model
from tests.serve.tiny_model import NAME

pytestmark = pytest.mark.long

ASK: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "the cat"}], "temperature": 0}
NO_THOUGHTS = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="session")
def server(speaking_server: RunningServer) -> RunningServer:
    """These tests read what the model says."""
    return speaking_server


def prompt_of(server: RunningServer, **fields: Any) -> str:
    answer = server.post("/tokenize", {"model": NAME, "messages": ASK["messages"]} | fields)
    assert answer.status_code == 200, answer.text
    prompt: str = server.post("/detokenize", {"tokens": answer.json()["tokens"]}).json()["prompt"]
    return prompt


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|im_start|>assistant\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<|im_start|>assistant\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, NO_THOUGHTS),
        ({"reasoning_effort": "none"}, f"effort: none\n<|im_start|>assistant\n{NO_THOUGHTS}"),
        ({"reasoning_effort": "minimal"}, NO_THOUGHTS),
        ({"reasoning_effort": "high"}, "effort: high\n<|im_start|>assistant\n"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "effort: none\n<|im_start|>assistant\n",
        ),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "effort: low\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "the cat<|im_end|>\n"),
    ],
)
def test_variables_reach_the_template(thinker: RunningServer, fields: dict[str, Any], end: str) -> None:
    prompt = prompt_of(thinker, **fields)
    assert prompt.endswith(end), prompt
    answer: Any = thinker.client().chat.completions.create(
        **ASK, max_tokens=1, extra_body={"return_token_ids": True, **fields}
    )
    ids = answer.prompt_token_ids
    assert thinker.post("/detokenize", {"tokens": ids}).json()["prompt"] == prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"eos_token": "<|im_start|>"}}, "chat_template_kwargs.eos_token"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"chat_template_kwargs": {"no name": 1}}, "chat_template_kwargs.no name"),
        (
            {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
            "chat_template_kwargs.reasoning_effort",
        ),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
    ],
)
def test_names_that_are_not_free_are_refused(
    thinker: RunningServer, fields: dict[str, Any], param: str
) -> None:
    answer = thinker.post("/v1/chat/completions", ASK | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_control_tokens_in_a_variable_stay_text(thinker: RunningServer) -> None:
    def tokens_with(effort: str) -> list[int]:
        fields = {"messages": ASK["messages"], "chat_template_kwargs": {"reasoning_effort": effort}}
        tokens: list[int] = thinker.post("/tokenize", fields).json()["tokens"]
        return tokens

    closed = {"messages": ASK["messages"], "add_generation_prompt": False}
    end_of_turn = thinker.post("/tokenize", closed).json()["tokens"][-2]  # a line's end follows
    assert tokens_with("<|im_end|>").count(end_of_turn) == tokens_with("low").count(end_of_turn) == 1


def test_an_answer_without_a_limit_gets_the_servers_and_the_story_says_so(thinker: RunningServer) -> None:
    client = thinker.client()
    forever = {"ignore_eos": True}
    for stream in (False, True):
        if stream:
            chunks = list(client.chat.completions.create(**ASK, stream=True, extra_body=forever))
            call_id, reason = chunks[-1].id, chunks[-1].choices[0].finish_reason
        else:
            answer = client.chat.completions.create(**ASK, extra_body=forever)
            call_id, reason = answer.id, answer.choices[0].finish_reason
            assert answer.usage is not None and answer.usage.completion_tokens == DEFAULT_MAX_TOKENS
        assert reason == "length"
        (story,) = thinker.get(f"/v1/requests/{call_id}/explain").json()["data"]
        (limited,) = [event for event in story["events"] if event["kind"] == "limited"]
        assert limited["limit"] == DEFAULT_MAX_TOKENS and "--default-max-tokens" in limited["words"]
        assert "the request has no max_tokens" in story["summary"]


def test_a_limit_in_the_request_wins_over_the_servers(thinker: RunningServer) -> None:
    client = thinker.client()
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(**ASK | {name: 9}, extra_body={"ignore_eos": True})
        assert answer.usage is not None and answer.usage.completion_tokens == 9
        (story,) = thinker.get(f"/v1/requests/{answer.id}/explain").json()["data"]
        assert not any(event["kind"] == "limited" for event in story["events"])
    longer = client.chat.completions.create(**ASK, extra_body={"ignore_eos": True, "min_tokens": 11})
    assert longer.usage is not None and longer.usage.completion_tokens == 11


def test_the_models_list_shows_what_a_request_gets_that_leaves_it_out(thinker: RunningServer) -> None:
    (model,) = thinker.get("/v1/models").json()["data"]
    assert model["generation_defaults"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": DEFAULT_MAX_TOKENS,
    }
    assert thinker.get(f"/v1/models/{NAME}").json() == model


@pytest.mark.long
@needs_built_in_model
def test_the_built_in_model_is_sampled_so_that_it_answers_well(
    server: RunningServer, client: openai.OpenAI
) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert model["generation_defaults"] == {"temperature": 0.1, "top_p": 0.5, "max_tokens": 512}
    question: Any = {
        "messages": [{"role": "user", "content": "Tell me of Rome."}],
        "max_tokens": 12,
        "seed": 1,
    }
    left_out = client.chat.completions.create(model=MODEL, **question)
    said = client.chat.completions.create(model=MODEL, **question, temperature=0.1, top_p=0.5)
    hot = client.chat.completions.create(model=MODEL, **question, temperature=1.8, top_p=1)
    assert left_out.choices[0].message.content == said.choices[0].message.content
    assert hot.choices[0].message.content != said.choices[0].message.content
    asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answers = client.chat.completions.create(model=MODEL, messages=asked, max_tokens=10, n=16, seed=0)
    assert [one for one in answers.choices if "Paris" not in str(one.message.content)] == []


def test_a_negative_limit_is_refused_at_the_start() -> None:
    from cumulo.errors import CumuloError
    from cumulo.serve.options import ServeOptions

    with pytest.raises(CumuloError, match="default_max_tokens"):
        ServeOptions(default_max_tokens=-1)
    assert ServeOptions(default_max_tokens=0).default_max_tokens == 0


@needs_built_in_model
def test_a_continued_message_is_rendered_as_transformers_does(tmp_path: Any) -> None:
    """Templates that keep, trim and rewrite contents; transformers is the oracle."""
    transformers = pytest.importorskip("transformers")
    import asyncio

    own = ModelText.load(None)
    assert own.tokenizer.chat_template is not None
    templates = [
        own.tokenizer.chat_template.source,
        "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}bye",
    ]
    for template in templates:
        own.tokenizer.use_chat_template(template)
        oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=own.tokenizer.backend)
        oracle.chat_template = template
        for text in ("Once upon", "Once upon ", " Once\n", "user", "a" * 40):
            messages = [{"role": "user", "content": "A story, user"}, {"role": "assistant", "content": text}]
            expected = oracle.apply_chat_template(messages, tokenize=False, continue_final_message=True)
            prompt, _ = asyncio.run(
                own.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
            )
            assert prompt == expected, (template, text)
    own.close()


def test_without_keys_a_prompt_is_computed_whole(server: RunningServer, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="one two three four " * 30, max_tokens=1)
    (story,) = server.get(f"/v1/requests/{answer.id}/explain").json()["data"]
    assert story["tokens"]["prompt"] > 100
    kinds = [event["kind"] for event in story["events"]]
    assert kinds.count("chunk") == 1 and "shared" not in kinds, "there is no key to share a step with"
