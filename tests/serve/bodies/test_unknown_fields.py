"""Fields nobody here knows: ignored with a warning in messages and tools, refused in requests, unless leniency is
asked for."""

import json
from collections.abc import Iterator
from contextvars import copy_context
from importlib import import_module
from typing import Any, get_type_hints

import httpx
import pytest

from cumulo.serve.api.anthropic.request import CountTokensRequest, MessagesRequest
from cumulo.serve.api.openai.embeddings import EmbeddingRequest
from cumulo.serve.api.openai.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from cumulo.serve.api.responses.request import ResponsesRequest
from cumulo.serve.bodies.strict import Strict, settle_unknown
from cumulo.serve.bodies.warnings import open_notes, warn
from tests.serve.running_server import RunningServer, events_of, running_server
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long

WARNING = "x-cumulo-warning"
CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
# What litellm sends in the second round of a tool loop.
TOOL_LOOP: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant", "content": None, "provider_specific_fields": {"refusal": None},
        "tool_calls": [
            {
                "id": "call_1", "type": "function", "provider_specific_fields": {},
                "function": {"name": "add", "arguments": "{}", "provider_specific_fields": None},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "3", "cache_control": {"type": "ephemeral"}},
]  # fmt: skip
TOLD = [
    "messages[0].content[0].cache_control", "messages[1].provider_specific_fields",
    "messages[1].tool_calls[0].provider_specific_fields",
    "messages[1].tool_calls[0].function.provider_specific_fields", "messages[2].cache_control",
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = save_tiny_model(tmp_path_factory.mktemp("models"), max_context=2048)
    with running_server(str(model), "--no-console") as running:
        yield running


def ask(server: RunningServer, body: dict[str, Any], **headers: str) -> httpx.Response:
    return server.post(
        "/v1/chat/completions", body, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


def test_a_tool_loop_with_fields_of_a_library_is_answered_with_a_warning(server: RunningServer) -> None:
    answer = ask(server, CHAT | {"messages": TOOL_LOOP})
    assert answer.status_code == 200, answer.text
    assert answer.headers[WARNING].split("; ") == [
        f"{place} is not known here and was ignored" for place in TOLD
    ]


def test_a_stream_and_an_error_carry_the_warning_too(server: RunningServer) -> None:
    stream = ask(server, CHAT | {"messages": TOOL_LOOP, "stream": True})
    assert stream.status_code == 200 and TOLD[1] in stream.headers[WARNING]
    assert list(events_of(stream))
    wrong = ask(
        server, CHAT | {"messages": [*TOOL_LOOP, {"role": "user", "tool_call_id": "x", "content": ""}]}
    )
    assert wrong.status_code == 400 and TOLD[1] in wrong.headers[WARNING]


def test_tools_may_have_fields_of_their_own(server: RunningServer) -> None:
    tool = {"type": "function", "cache_control": {}, "function": {"name": "add", "parameters": {}, "x": 1}}
    answer = ask(server, CHAT | {"tools": [tool]})
    assert answer.status_code == 200, answer.text
    assert "tools[0].cache_control is" in answer.headers[WARNING]
    assert "tools[0].function.x is" in answer.headers[WARNING]


def test_a_request_in_good_form_has_no_warning(server: RunningServer) -> None:
    assert WARNING not in ask(server, CHAT).headers
    assert WARNING not in ask(server, CHAT | {"tools": [], "store": False}).headers


def test_a_misspelt_field_of_a_message_is_still_refused(server: RunningServer) -> None:
    answer = ask(server, CHAT | {"messages": [{"role": "user", "conten": "Hi"}]})
    assert answer.status_code == 400 and "did you mean 'content'?" in answer.text
    # It is no misspelling of a field that is there.
    answer = ask(server, CHAT | {"messages": [{"role": "user", "content": "Hi", "contents": "Hi"}]})
    assert answer.status_code == 200 and "messages[0].contents" in answer.headers[WARNING]


def test_unknown_fields_of_a_request_are_refused_unless_leniency_is_asked_for(server: RunningServer) -> None:
    for body in (CHAT | {"max_token": 3}, CHAT | {"frobnicate": 1}, CHAT | {"stream_options": {"x": 1}}):
        assert ask(server, body).status_code == 400
    lenient = ask(
        server, CHAT | {"max_token": 3, "stream_options": {"x": 1}, "stream": True}, X_Cumulo_Lenient="1"
    )
    assert lenient.status_code == 200, lenient.text
    assert lenient.headers[WARNING] == (
        "max_token is not known here and was ignored; stream_options.x is not known here and was ignored"
    )
    assert ask(server, CHAT | {"frobnicate": 1}, X_Cumulo_Lenient="0").status_code == 400
    assert ask(server, CHAT | {"temperature": "warm"}, X_Cumulo_Lenient="1").status_code == 400
    answer = server.post("/tokenize", {"prompt": "a", "y": 1}, headers={"X-Cumulo-Lenient": "1"})
    assert answer.status_code == 200 and answer.headers[WARNING].startswith("y is not known")


def test_a_large_body_is_warned_about_as_well(server: RunningServer) -> None:
    answer = ask(server, CHAT | {"messages": TOOL_LOOP, "user": None, "metadata": {"a": "b" * 500}})
    padded = httpx.post(
        server.url + "/v1/chat/completions",
        content=b" " * 70_000 + answer.request.content,
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert padded.headers[WARNING] == answer.headers[WARNING]


def test_names_cannot_break_out_of_the_header(server: RunningServer) -> None:
    names = ["a\r\nSet-Cookie: x=1", "é\x00\x7f\u2028", "n" * 5000, *(f"f{i}" for i in range(500))]
    body = CHAT | {"messages": [{"role": "user", "content": "Hi"} | dict.fromkeys(names, 1)]}
    answer = httpx.post(
        server.url + "/v1/chat/completions",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert answer.status_code == 200 and "set-cookie" not in answer.headers
    told = answer.headers[WARNING]
    assert told.isascii() and told.isprintable() and len(told) < 2000
    assert r"messages[0].a\x0d\x0aSet-Cookie: x=1 is not known" in told and told.endswith("and 495 more")


def test_any_code_may_warn_and_nothing_happens_outside_of_a_request() -> None:
    warn("nobody hears this")
    notes = open_notes()
    warn("max_tokens was \n lowered")
    warn("max_tokens was \n lowered")
    assert notes.header() == rb"max_tokens was \x0a lowered"
    settle_unknown(
        ChatRequest.model_validate(CHAT | {"messages": [{"role": "user", "content": "x", "y": 1}]})
    )
    header = notes.header()
    assert header is not None and header.endswith(b"messages[0].y is not known here and was ignored")


def test_a_lenient_request_ignores_what_is_not_known() -> None:
    def read() -> bytes | None:
        notes = open_notes(lenient=True)
        warn("the endpoint has something to say, too")
        body = TokenizeRequest.model_validate({"prompt": "a", "frobnicate": 1})
        settle_unknown(body)
        assert body.model_dump(exclude_unset=True) == {"prompt": "a"}
        return notes.header()

    told = copy_context().run(read)  # the notes are this context's, and no other test's
    assert told == b"the endpoint has something to say, too; frobnicate is not known here and was ignored"


@pytest.mark.parametrize(
    ("client", "params", "ours"),
    [
        ("openai.types.chat.completion_create_params", "CompletionCreateParamsBase", ChatRequest),
        ("openai.types.completion_create_params", "CompletionCreateParamsBase", CompletionRequest),
        ("openai.types.embedding_create_params", "EmbeddingCreateParams", EmbeddingRequest),
        ("openai.types.responses.response_create_params", "ResponseCreateParamsBase", ResponsesRequest),
        ("anthropic.types.message_create_params", "MessageCreateParamsBase", MessagesRequest),
        ("anthropic.types.beta.message_create_params", "MessageCreateParamsBase", MessagesRequest),
        ("anthropic.types.beta.message_count_tokens_params", "MessageCountTokensParams", CountTokensRequest),
    ],
)
def test_every_field_of_the_official_clients_is_known(client: str, params: str, ours: type[Strict]) -> None:
    pytest.importorskip(client.partition(".")[0])
    fields = set(get_type_hints(getattr(import_module(client), params))) - {"betas"}  # which are a header
    known = {field.alias or name for name, field in ours.model_fields.items()}
    assert fields <= known | set(ours.neutral) | set(ours.instead) | ours.ignored
