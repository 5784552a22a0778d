"""Refused calls with their reason, and requests found by a short form of their id: plain data, no server."""

import json

import pytest

from cumulo.serve.observe.stories import NotUnique, Record, Rejection, Rejections, Stories


def rejection(received_s: float, caller: str | None, message: str = "no") -> Rejection:
    answer = json.dumps({"error": {"message": message}}).encode()
    return Rejection(received_s, 0.001, "/v1/chat/completions", 429, caller, answer)


def test_strangers_cannot_push_out_the_rejections_of_callers() -> None:
    kept = Rejections(3)
    kept.note(rejection(1.0, "mine", "too fast"))
    for number in range(1000):
        kept.note(rejection(2.0 + number, None))
    newest_first = kept.recent()
    assert len(newest_first) == 4
    assert newest_first[-1].caller == "mine" and newest_first[-1].reason == "too fast"
    assert newest_first[0].received_s == 1001.0


def test_an_answer_that_is_no_json_is_shown_as_it_is() -> None:
    assert Rejection(0.0, 0.0, "/v1/x", 400, "mine", b"Bad Request").reason == "Bad Request"
    assert Rejection(0.0, 0.0, "/v1/x", 400, "mine", b'{"error": 1}').reason == '{"error": 1}'
    assert Rejection(0.0, 0.0, "/v1/x", 503, "mine", b"").reason == "status 503"


def record(request_id: str, call_id: str = "", caller: str = "mine") -> Record:
    return Record(request_id, call_id or request_id, caller, "model", 0.0, 0.0, 4, 1, True)


def stories(*records: Record) -> Stories:
    kept = Stories(100)
    for one in records:
        kept.add(one)
    return kept


def test_a_unique_beginning_names_a_request_with_or_without_its_prefix() -> None:
    kept = stories(record("chatcmpl-3f2a91c0b7d1"), record("chatcmpl-77aa91c0b7d1"))
    for name in ("chatcmpl-3f2a91c0b7d1", "chatcmpl-3f2a", "3f2a91c0b7", "3f2a"):
        assert [r.request_id for r in kept.named(name, lambda _: True)] == ["chatcmpl-3f2a91c0b7d1"]
    for name in ("3f2", "chat-3f2a", "91c0b7d1", "nothing"):
        assert kept.named(name, lambda _: True) == []


def test_several_matches_are_an_error_and_foreign_requests_are_not_counted() -> None:
    kept = stories(
        record("chatcmpl-3f2a91"), record("chatcmpl-3f2a77"), record("chatcmpl-3f2a55", caller="other")
    )
    with pytest.raises(NotUnique, match="2 requests begin with '3f2a'"):
        kept.named("3f2a", lambda caller: caller == "mine")
    assert kept.named("chatcmpl-3f2a55", lambda caller: caller == "mine") == []
    assert len(kept.named("3f2a", lambda caller: caller == "other")) == 1


def test_one_of_several_prompts_is_named_by_its_number() -> None:
    many = [record(f"embd-0123456789abcdef-{n}", "embd-0123456789abcdef") for n in range(12)]
    kept = stories(*many)
    assert [r.request_id for r in kept.named("0123456789-1", lambda _: True)] == ["embd-0123456789abcdef-1"]
    assert len(kept.named("0123456789", lambda _: True)) == 12
