"""Plain chat requests are read on a shorter way; pydantic's model of the same request is the oracle."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cumulo.serve.model_formats import ModelFormats
from cumulo.serve.openai.conversation import conversation
from cumulo.serve.openai.plain_chat import PlainChat, PlainMessage, read_plain
from cumulo.serve.openai.sampling import ChatParams, chat_params
from cumulo.serve.openai.schemas import ChatRequest, Message
from tests import thorough


def read_chat(body: bytes) -> Any:
    """A PlainChat where the body is one, else a ChatRequest; raises pydantic's ValidationError if it is neither."""
    try:
        return read_plain(body)
    except (msgspec.MsgspecError, ValueError):
        return ChatRequest.model_validate_json(body)


BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
DEFAULTS = {"temperature": 0.6, "top_k": 20}
ASKED: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"seed": 1}, {"seed": 2}, {"stop": "x"}, {"stop": ["x"]}, {"logit_bias": {"3": 1}},
]  # fmt: skip

numbers = st.one_of(
    st.integers(-3, 3), st.integers(), st.floats(), st.sampled_from([0.5, 1.0, 2.0, 128.0, 1 << 31, 1e300])
)
anything = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=4), st.lists(st.text(max_size=3)))
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer", "tool", "king"])},
        optional={"content": st.one_of(st.text(), st.none(), st.integers()), "name": st.text(max_size=3)},
    ),
    max_size=3,
)
bodies = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys((*ChatRequest.model_fields, "suffix", "store"), anything)
    | {
        "model": st.one_of(st.text(), st.integers()),
        "messages": messages,
        "stream_options": st.one_of(
            st.none(), st.dictionaries(st.sampled_from(["include_usage", "other"]), anything)
        ),
    },
)


def told(model: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(model, name) for name in names}


def same_as_pydantic(content: bytes) -> bool:
    """Whether the body is read as a plain one; if so, pydantic reads the same in it."""
    try:
        read = read_chat(content)
    except ValidationError:
        return False
    if not isinstance(read, PlainChat):
        return False
    oracle = ChatRequest.model_validate_json(content)  # accepts it, or the test fails here
    given = (read.messages, read.stream_options), (oracle.messages, oracle.stream_options)
    assert [told(m, tuple(Message.model_fields)) for m in given[0][0]] == [
        told(m, tuple(Message.model_fields)) for m in given[1][0]
    ]
    assert (given[0][1] is None) == (given[1][1] is None)
    if given[0][1] is not None and given[1][1] is not None:
        assert given[0][1].include_usage == given[1][1].include_usage
    rest = tuple(name for name in ChatRequest.model_fields if name not in ("messages", "stream_options"))
    for name, value in told(read, rest).items():
        expected = getattr(oracle, name)
        assert value == expected and type(value) is type(expected), name
    return True


@settings(max_examples=thorough.examples(300), deadline=None)
@given(bodies)
def test_whatever_is_read_as_plain_says_the_same_to_pydantic(body: dict[str, Any]) -> None:
    same_as_pydantic(json.dumps(body).encode())
    same_as_pydantic(json.dumps(BODY | {n: v for n, v in body.items() if n not in BODY}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        '"stream": true, "stream_options": {"include_usage": true}, "temperature": 0, "max_tokens": 8',
        '"n": 2, "seed": -9223372036854775808, "top_p": 0.5, "stop": "\\n", "user": "me"',
        '"stop": ["a", "b"], "presence_penalty": -2, "frequency_penalty": 2, "logprobs": true, "top_logprobs": 3',
        '"top_k": 4, "min_p": 0.1, "min_tokens": 1, "ignore_eos": false, "max_completion_tokens": 3',
        '"n": null, "stream": null, "temperature": null, "stop": null',
        '"max_tokens": 1, "max_tokens": 2',
    ],
)  # fmt: skip
def test_common_requests_take_the_short_way(fields: str) -> None:
    assert same_as_pydantic(f"{json.dumps(BODY)[:-1]}, {fields}}}".encode())


@pytest.mark.parametrize(
    "fields",
    [
        '"tools": []', '"response_format": {"type": "text"}', '"logit_bias": {"1": 2}', '"store": false',
        '"max_tokens": true', '"max_tokens": 4.0', '"max_tokens": 0', '"temperature": 2.5', '"n": 129',
        '"temperature": NaN',
        '"seed": 9223372036854775808', '"stop": ""', '"stream": 1', '"unheard_of": 1', '"temperature": 1e400',
    ],
)  # fmt: skip
def test_everything_else_is_left_to_pydantic(fields: str) -> None:
    assert not same_as_pydantic(f"{json.dumps(BODY)[:-1]}, {fields}}}".encode())


@pytest.mark.parametrize(
    "content", ['"\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"é"', "null", '[{"type":"text","text":"a"}]']
)
def test_texts_are_read_as_pydantic_reads_them(content: str) -> None:
    same_as_pydantic(f'{{"model": "tiny", "messages": [{{"role": "user", "content": {content}}}]}}'.encode())


def test_a_broken_body_is_refused_by_pydantic() -> None:
    good = json.dumps(BODY).encode()
    for content in (b"", good[:-1], good + b"x", b"\xef\xbb\xbf" + good, good.replace(b"hello", b"\xff")):
        with pytest.raises(ValidationError):
            read_chat(content)


def test_a_plain_request_has_all_a_request_has() -> None:
    for plain, full in ((PlainChat, ChatRequest), (PlainMessage, Message)):
        assert set(plain.__struct_fields__) <= set(full.model_fields)
        for name, field in full.model_fields.items():
            assert hasattr(plain, name), name
            if name not in plain.__struct_fields__:
                assert getattr(plain, name) is None and not field.is_required(), name
        for own in msgspec.structs.fields(plain):
            if not own.required:
                assert own.default == full.model_fields[own.name].default, own.name


def test_kept_params_are_those_that_would_be_made_anew() -> None:
    kept, made = ChatParams(), []
    for fields in ASKED:
        for _ in range(2):
            body = read_chat(json.dumps(BODY | fields).encode())
            params = kept.params_for(body, DEFAULTS, None, False)
            assert params == chat_params(ChatRequest.model_validate(BODY | fields), DEFAULTS)
            made.append(params)
    assert made[0] is made[1] and made[0] != made[2]
    plain = read_chat(json.dumps(BODY).encode())
    assert kept.params_for(plain, DEFAULTS, None, True) != kept.params_for(plain, DEFAULTS, None, False)
    assert kept.params_for(plain, {}, None, False) == chat_params(plain, {})
    with pytest.raises(Exception, match="top_logprobs needs logprobs"):
        kept.params_for(read_chat(json.dumps(BODY | {"top_logprobs": 1}).encode()), DEFAULTS, None, False)


def test_plain_messages_become_the_same_conversation() -> None:
    texts = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    content = json.dumps(BODY | {"messages": texts}).encode()
    formats = ModelFormats("hermes", True, False, False, False)
    plain, full = read_chat(content), ChatRequest.model_validate_json(content)
    assert conversation(plain.messages, formats) == conversation(full.messages, formats)
