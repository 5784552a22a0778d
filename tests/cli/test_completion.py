"""Reading prompts: lines, JSON lines, and what is wrong with them."""

import pytest

from cumulo.cli.generate import read_jobs
from cumulo.cli.shared.options import SamplingOptions
from cumulo.engine.decide.prompt_lines import parse_lines
from cumulo.errors import InvalidRequest

DEFAULTS = {"temperature": 0.5, "max_tokens": 9}


def test_each_line_that_is_not_blank_is_a_prompt() -> None:
    jobs = parse_lines("one\n\n  two \n", "here", DEFAULTS)
    assert [job.prompt for job in jobs] == ["one", "  two "]
    assert {job.sampling["temperature"] for job in jobs} == {0.5}


def test_json_lines_may_have_sampling_options_of_their_own() -> None:
    text = '{"prompt": "a", "temperature": 0, "id": 7}\n{"prompt": "b", "stop": "x", "logit_bias": {"5": -1}}'
    first, second = parse_lines(text, "here", DEFAULTS)
    assert (first.name, first.sampling) == ("7", {"temperature": 0, "max_tokens": 9})
    assert (second.sampling["stop"], second.sampling["logit_bias"]) == ("x", {5: -1})


def test_messages_are_chats() -> None:
    (job,) = parse_lines('{"messages": [{"role": "user", "content": "hi"}]}', "here", DEFAULTS)
    assert job.is_chat
    assert job.shown == "hi"


def test_chat_turns_prompts_into_messages() -> None:
    (job,) = read_jobs("hi", None, DEFAULTS, chat=True)
    assert job.prompt == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" \n\n", "contains no prompt"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ('{"prompt": "a"}\n\n"b"', "line 3 must be an object"),
        ('{"text": "a"}', 'either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"prompt": "a", "temprature": 1}', "unknown fields temprature"),
        ('{"prompt": "a", "temperature": -1}', "line 1: temperature must be in"),
        ('{"prompt": 5}', "a prompt is text"),
        ('{"messages": "hi"}', "messages are a list"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list of"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias maps token ids"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words.replace("(", r"\(")):
        parse_lines(text, "here", DEFAULTS)


def test_prompts_and_messages_do_not_mix(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}')
    with pytest.raises(InvalidRequest, match="use one kind"):
        read_jobs(None, path, DEFAULTS, chat=False)
    assert all(job.is_chat for job in read_jobs(None, path, DEFAULTS, chat=True))


def test_what_nobody_chose_is_the_models_to_recommend() -> None:
    recommended = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    assert not recommended & SamplingOptions().given().keys()
    assert SamplingOptions(top_p=1.0).given()["top_p"] == 1.0
