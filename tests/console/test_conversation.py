"""Conversations, answers and running answers as plain data; no browser, no server."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nicegui")

from cumulo.console.chat.answer import ChatAnswer
from cumulo.console.chat.conversation import (
    LARGEST_STORED_BYTES,
    Conversation,
    fenced,
    read_files,
    user_entry,
)
from cumulo.console.chat.running_answers import ApiCaller, ApiFailure, RunningAnswers
from cumulo.console.chat.settings import BUILT_IN, SettingsPanel, effective, read_own
from cumulo.engine.decide.story import Story
from cumulo.serve.observe.stories import Record

SAID = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "about": {}},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "d"},
    {"role": "assistant", "content": "e"},
]  # fmt: skip


def chunk(content: str, **more: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"delta": {"content": content}, "finish_reason": None, **more}]}


def test_a_turn_is_a_message_and_everything_that_answers_it() -> None:
    talk = Conversation.from_entries(SAID)
    talk.delete_turn(talk.entries[2])
    assert [entry["content"] for entry in talk.entries] == ["a", "b"]


def test_messages_hold_only_what_the_api_takes_and_files_become_fences() -> None:
    talk = Conversation.from_entries(SAID)
    talk.add({"role": "assistant", "content": "", "pending": "x"})
    assert [sorted(message) for message in talk.messages()][1] == ["content", "role"]
    assert len(talk.messages()) == len(SAID), "what has not been said yet is not sent"
    talk = Conversation()
    talk.add(user_entry("Why?", [{"name": "a.md", "text": "```\nx\n```\n"}]))
    assert talk.messages()[0]["content"] == "File: a.md\n````\n```\nx\n```\n````\n\nWhy?"
    assert fenced("b", "plain").count("```") == 2


def test_what_a_browser_stored_is_checked_before_it_is_used() -> None:
    talk = Conversation.from_entries(SAID)
    again = Conversation.from_stored(talk.stored())
    assert again is not None and again.entries == talk.entries and again.id == talk.id
    good = talk.stored()
    for wrong in (
        None, [], {}, good | {"id": "../x"}, good | {"entries": [1]},
        good | {"entries": [{"role": "system", "content": ""}]},
        good | {"entries": [{"role": "user", "content": 1}]},
        good | {"entries": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},
        good | {"entries": [{"role": "assistant", "content": "", "tool_calls": 1}]},
        good | {"entries": [{"role": "assistant", "content": "", "about": {"output_tokens": "many"}}]},
        good | {"entries": [{"role": "assistant", "content": "", "odds": [["a", "b", "c"]]}]},
        good | {"entries": [{"role": "user", "content": "", "files": [{"name": "a"}]}]},
    ):  # fmt: skip
        assert Conversation.from_stored(wrong) is None, wrong


def test_a_long_conversation_loses_probabilities_first_then_its_oldest_turns() -> None:
    odds = [["token", 0.5, "x" * 100]] * 10_000
    talk = Conversation.from_entries(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "odds": odds}] * 2
    )
    kept = talk.stored()["entries"]
    assert len(kept) == 4 and not any("odds" in entry for entry in kept)
    talk = Conversation.from_entries(
        [{"role": "user", "content": str(n) * (LARGEST_STORED_BYTES // 3)} for n in range(5)]
    )
    assert [entry["content"][0] for entry in talk.stored()["entries"]] == ["3", "4"]


def test_files_that_are_none_or_too_large_are_left_out() -> None:
    assert read_files(
        [{"name": "a", "text": "b"}, {"name": "c"}, 1, {"name": "d", "text": "x" * 300_000}]
    ) == [{"name": "a", "text": "b"}]
    assert read_files("text") == []


def test_an_answer_is_collected_and_survives_storage() -> None:
    answer = ChatAnswer()
    for byte in "é".encode():
        odds = {"token": "?", "bytes": [byte], "logprob": -0.7, "top_logprobs": []}
        answer.add_event(chunk("é" if byte == 0xA9 else "", logprobs={"content": [odds]}))
    answer.add_event({"id": "chatcmpl-1", "choices": [{"delta": {}, "finish_reason": "length"}]})
    answer.add_event({"id": "chatcmpl-1", "choices": [], "usage": {"completion_tokens": 2}})
    assert (answer.text, answer.output_tokens, answer.finish_reason) == ("é", 2, "length")
    assert [(text, share) for text, share, _ in answer.odds] == [("é", 0.4966)], (
        "two tokens spell one character"
    )
    again = ChatAnswer.from_entry(answer.entry())
    assert (again.text, again.request_id, again.odds, again.ttft_s) == (
        "é",
        "chatcmpl-1",
        answer.odds,
        answer.ttft_s,
    )


def test_an_answer_is_shown_with_the_times_of_its_story() -> None:
    answer = ChatAnswer(output_tokens=5, ttft_s=0.9, decode_s=9.0)
    record = Record("chatcmpl-1", "chatcmpl-1", "anyone", "model", 10.0, 10.0, 4, 1, True)
    answer.take_times([record])
    assert answer.ttft_s == 0.9, "no story yet"
    record.story = Story(10.1, first_token_s=10.5, finished_s=12.5)
    answer.take_times([record])
    assert (answer.ttft_s, answer.decode_tok_s) == (0.5, 2.0)


class Scripted(ApiCaller):
    """An API that says what the test wants, when it wants."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events
        self.go_on = asyncio.Event()

    async def stream(self, path: str, body: dict[str, Any], hang_up: asyncio.Event) -> Any:
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            yield event
            await self.go_on.wait()


def test_an_answer_goes_on_without_a_page_and_only_its_owner_finds_it() -> None:
    async def run() -> None:
        answers, api = RunningAnswers(), Scripted([chunk("Hello"), chunk(" you")])
        running = answers.begin("mine", api, {})
        await running.news(0)
        assert running.answer.text == "Hello" and not running.done
        assert answers.get("other", running.id) is None and answers.get("mine", "none") is None
        api.go_on.set()
        while not running.done:
            await running.news(running.version)
        found = answers.get("mine", running.id)
        assert found is not None and found.answer.text == "Hello you" and not found.refused

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_refusal_is_told_from_a_failure_in_the_middle() -> None:
    async def run() -> None:
        for events, refused in (
            ([ApiFailure("queue full")], True),
            ([chunk("Hel"), ApiFailure("engine died")], False),
        ):
            api = Scripted(events)
            api.go_on.set()
            running = RunningAnswers().begin("mine", api, {})
            while not running.done:
                await running.news(running.version)
            assert running.refused is refused and running.answer.problem is not None

    asyncio.run(asyncio.wait_for(run(), 60))


def test_finished_answers_do_not_pile_up() -> None:
    async def run() -> None:
        answers, api = RunningAnswers(), Scripted([])
        for _ in range(400):
            running = answers.begin("mine", api, {})
            while not running.done:
                await running.news(running.version)
        assert len(answers._answers) <= 257

    asyncio.run(asyncio.wait_for(run(), 60))


def test_empty_fields_show_what_applies() -> None:
    shown = effective({"temperature": 0.2, "top_p": 0.9})
    assert (shown["temperature"], shown["top_p"], shown["top_k"], shown["seed"]) == (
        "0.2",
        "0.9",
        "0",
        "random",
    )


def test_two_models_that_are_compared_take_the_same_settings() -> None:
    panel = SettingsPanel.__new__(SettingsPanel)
    empty = SimpleNamespace(value=None, props=lambda text: None)
    panel._numbers = dict.fromkeys(effective({}), empty)
    panel._model, panel._beside = SimpleNamespace(value="one"), SimpleNamespace(value="two")
    panel._json = panel._odds = SimpleNamespace(value=False)
    panel._tools = SimpleNamespace(fields=dict)
    panel.show_effective({"temperature": 0.2, "top_k": 7})
    asked = panel.request("one")
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (0.2, 1.0, 7) and "seed" not in asked
    panel._beside = SimpleNamespace(value=None)
    assert "temperature" not in panel.request("one"), "a model alone has its own"


def test_stored_presets_are_checked_and_bounded() -> None:
    assert read_own({"a": "b", "c": 1, "": "d", "x" * 99: "e"}) == {"a": "b"}
    assert len(read_own({str(n): "p" for n in range(99)})) == 50
    assert read_own([1]) == {} and all(BUILT_IN.values())


@pytest.mark.parametrize("text", ["", "not json", '{"error": 3}'])
def test_an_error_that_is_no_json_still_tells_its_status(text: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 421, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})

    async def run() -> None:
        with pytest.raises(ApiFailure, match="status 421"):
            async for _ in ApiCaller(app, None).stream("/v1/chat/completions", {}, asyncio.Event()):
                pass

    asyncio.run(run())


def said(text: str, parent: int, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text, "parent": parent}


def tree() -> Conversation:
    """a -> b -> c -> d, b2 another answer to a, and a2 -> e, another beginning."""
    return Conversation.from_entries(
        [
            said("a", -1), said("b", 0, "assistant"), said("c", 1), said("d", 2, "assistant"),
            said("b2", 0, "assistant"), said("a2", -1), said("e", 5, "assistant"),
        ]
    )  # fmt: skip


def shown(talk: Conversation) -> str:
    return " ".join(entry["content"] for entry in talk.entries)


def test_versions_are_branches_and_each_is_shown_to_its_newest_end() -> None:
    talk = tree()
    a, b, b2 = talk.nodes[0], talk.nodes[1], talk.nodes[4]
    assert shown(talk) == "a2 e"
    assert [one["content"] for one in talk.versions(a)] == ["a", "a2"] and talk.versions(b) == [b, b2]
    talk.choose(b)
    assert shown(talk) == "a b c d"
    talk.choose(a)
    assert shown(talk) == "a b2"
    again = Conversation.from_stored(talk.stored())
    assert again is not None and shown(again) == "a b2" and again.nodes == talk.nodes


def test_a_deleted_turn_takes_its_answers_with_it_and_not_what_was_said_later() -> None:
    talk = tree()
    talk.choose(talk.nodes[3])
    talk.delete_turn(talk.nodes[0])
    assert shown(talk) == "c d" and [entry["content"] for entry in talk.nodes] == ["c", "d", "a2", "e"]
    talk.delete_turn(talk.nodes[0])
    assert shown(talk) == "a2 e", "another version is shown where there is one"


def test_what_was_refused_is_taken_out_again() -> None:
    talk = tree()
    before = talk.stored()["entries"]
    question = talk.add({"role": "user", "content": "f"})
    answer = talk.add({"role": "assistant", "content": "", "pending": "x"})
    assert talk.take_back(answer) == [answer, question]
    assert shown(talk) == "a2 e" and talk.stored()["entries"] == before
    # Another answer to an answered question: the question stays, and the answer that was there is shown.
    again = talk.add({"role": "assistant", "content": "", "pending": "x"}, talk.nodes[-1]["parent"])
    assert talk.take_back(again) == [again]
    assert shown(talk) == "a2 e" and talk.stored()["entries"] == before
    edited = talk.add({"role": "user", "content": "a3"}, -1)  # a setting was wrong: no answer was begun
    assert talk.take_back() == [edited] and shown(talk) == "a2 e"
    talk.add({"role": "tool", "content": "1"})
    talk.add({"role": "tool", "content": "2"})
    assert len(talk.take_back()) == 2 and shown(talk) == "a2 e"


def test_a_summary_is_sent_instead_of_what_came_before_it() -> None:
    talk = Conversation.from_entries(SAID)
    talk.entries[2]["summary"] = "a and b"
    assert [message["content"] for message in talk.messages()] == ["c", "", "d", "e"]
    assert (talk.summary, talk.turn_starts()) == ("a and b", [2])


def test_a_stored_tree_that_is_none_is_not_used() -> None:
    good = tree().stored()
    for wrong in (
        good | {"leaf": 7},
        good | {"leaf": -2},
        good | {"entries": [said("a", 0)]},
        good | {"queued": [1]},
    ):
        assert Conversation.from_stored(wrong) is None, wrong
