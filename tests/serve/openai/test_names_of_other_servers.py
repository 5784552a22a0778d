"""Fields that clients of vLLM and llama.cpp send mean the same here, in chats and in text completions."""

import json
import re
from typing import Any

import openai
import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
WHOLE_NUMBER = r"\d{1,2}"
LLAMA_GRAMMAR = """# Numbers with commas between them
root ::= number-x ("," number-x){0,2}
number-x ::= "x" [0-9]
"""
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": SCHEMA}}, "json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json"),
    ({"guided_json": SCHEMA}, "json"),
    ({"json_schema": SCHEMA}, "json"),
    ({"structured_outputs": {"regex": WHOLE_NUMBER}}, WHOLE_NUMBER),
    ({"guided_regex": WHOLE_NUMBER}, WHOLE_NUMBER),
    ({"structured_outputs": {"choice": ["a+b", "c d/e"]}}, r"a\+b|c d/e"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x[0-9]"),
    ({"guided_grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
    ({"guided_grammar": LLAMA_GRAMMAR}, r"x\d(,x\d){0,2}"),
    ({"grammar": LLAMA_GRAMMAR}, r"x\d(,x\d){0,2}"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json"),
]


def texts(client: openai.OpenAI, fields: dict[str, Any], **more: Any) -> tuple[str, str]:
    """The answers of a chat and of a text completion."""
    options: dict[str, Any] = {"model": MODEL, "temperature": 1, "seed": 3, "max_tokens": 40, **more}
    chat = client.chat.completions.create(
        **options, messages=[{"role": "user", "content": "Name a number."}], extra_body=fields
    )
    completion = client.completions.create(**options, prompt="A number:", extra_body=fields)
    return chat.choices[0].message.content or "", completion.choices[0].text


@pytest.mark.parametrize(("fields", "form"), FORMS, ids=[json.dumps(fields)[:40] for fields, _ in FORMS])
def test_a_form_is_enforced_by_every_name(client: openai.OpenAI, fields: dict[str, Any], form: str) -> None:
    for text in texts(client, fields):
        if form == "json":
            assert json.loads(text)["n"] <= 99
        else:
            assert re.fullmatch(form, text), text


def test_log_probabilities_of_named_tokens_are_those_of_the_whole_distribution(server: RunningServer) -> None:
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
        "temperature": 0,
    }
    text = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "temperature": 0}
    top = {"logprobs": True, "top_logprobs": 20}
    (usual, *_) = server.post("/v1/chat/completions", chat | top).json()["choices"][0]["logprobs"]["content"]
    expected = {one["token"]: one["logprob"] for one in usual["top_logprobs"]}
    ids = [
        server.post("/tokenize", {"prompt": token}).json()["tokens"]
        for token in list(expected)[5:15]
        if "\ufffd" not in token
    ]
    named = [one for (one, *rest) in ids if not rest]
    asked = {"logprobs": True, "logprob_token_ids": named}
    (found, *_) = server.post("/v1/chat/completions", chat | asked).json()["choices"][0]["logprobs"][
        "content"
    ]
    told = {one["token"]: one["logprob"] for one in found["top_logprobs"]}
    assert len(told) == len(named) + 1 > 4 and usual["token"] in told
    assert told == {token: pytest.approx(expected[token], abs=1e-4) for token in told}
    columns = server.post("/v1/completions", text | {"logprobs": 1, "logprob_token_ids": named}).json()
    for tokens in columns["choices"][0]["logprobs"]["top_logprobs"]:
        assert set(told) - {usual["token"]} <= set(tokens)
    for wrong, told_why in (
        ({"use_beam_search": True}, "beam search"),
        ({"logprob_token_ids": [1 << 30]}, "ids are 0 to"),
    ):
        answer = server.post("/v1/completions", text | {"logprobs": 1, "logprob_token_ids": named} | wrong)
        assert answer.status_code == 400 and told_why in answer.text


def test_bad_words_are_not_said_as_whole_words(client: openai.OpenAI) -> None:
    for text in texts(client, {}, temperature=0):
        words = re.findall(r"\w{3,}", text)
        banned = list(dict.fromkeys(words))[:5]
        assert banned
        for without in texts(client, {"bad_words": banned}, temperature=0):
            said = re.findall(r"\w+", without)[:-1]  # the last one is cut by max_tokens
            assert said and not set(banned) & set(said), without


def test_a_prompt_is_cut_to_its_last_tokens(server: RunningServer) -> None:
    chat = {"messages": [{"role": "user", "content": "word " * 200}]}
    for path, prompt in (
        ("/v1/completions", {"prompt": "word " * 9000}),
        ("/v1/completions", {"prompt": [5] * 300}),
        ("/v1/chat/completions", chat),
    ):
        body = {"model": MODEL, "max_tokens": 2, "truncate_prompt_tokens": 50, **prompt}
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 50
    longest = {"model": MODEL, "max_tokens": 1, "truncate_prompt_tokens": -1, "prompt": "word " * 9000}
    if (answer := server.post("/v1/completions", longest)).status_code == 200:
        context = server.post("/tokenize", {"prompt": "a"}).json()["max_model_len"]
        assert answer.json()["usage"]["prompt_tokens"] == context - 1


def test_lengths_and_penalties_have_their_other_names(server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": "Once", "temperature": 0, "ignore_eos": True}
    ours = server.post("/v1/completions", body | {"max_tokens": 7, "repetition_penalty": 1.5}).json()
    theirs = server.post("/v1/completions", body | {"n_predict": 7, "repeat_penalty": 1.5}).json()
    assert ours["choices"] == theirs["choices"] and theirs["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"structured_outputs": {}}, "one of json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of json"),
        ({"guided_json": "{"}, "no valid JSON"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "under two names"),
        ({"n_predict": 2, "max_tokens": 3}, "under two names"),
        ({"bad_words": ["x"], "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"logprob_token_ids": [5]}, "needs logprobs"),
        ({"grammar": "root ::= this is (not valid GBNF"}, "Expected ')'"),
        ({"grammar": "root ::= missing"}, "'missing' not found"),
        ({"grammar": "root ::= " + "(" * 5000}, "nested too deeply"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "schema"),
    ],
)
def test_what_does_not_go_together_is_refused(
    server: RunningServer, fields: dict[str, Any], told: str
) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"model": MODEL, "prompt": "Hi"})):
        answer = server.post(path, body | fields)
        assert answer.status_code == 400 and told in answer.json()["error"]["message"], answer.text


def test_the_fingerprint_is_the_servers(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    whole = client.chat.completions.create(**ask).system_fingerprint
    streamed = {chunk.system_fingerprint for chunk in client.chat.completions.create(**ask, stream=True)}
    text = client.completions.create(model=MODEL, prompt="Hi", max_tokens=2).system_fingerprint
    assert whole is not None and whole.startswith("fp_") and streamed == {whole} and text == whole
