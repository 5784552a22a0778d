"""Which turns of a long chat are sent: the decision on counts, and the counting."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some

from cumulo.models.text.chat_window import (
    ChatCounter,
    ChatWindow,
    choose_window,
    sent_messages,
    summary_requests,
    summary_tokens,
    turns_of,
)
from cumulo.models.text.tokenizer import load_tokenizer
from tests.serve.tiny_model import save_tiny_model

TALK = [
    {"role": "user", "content": "the cat sat"},
    {"role": "assistant", "content": "on the mat"},
    {"role": "user", "content": "and the dog"},
    {"role": "assistant", "content": "saw that"},
    {"role": "user", "content": "the cat was there"},
]


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> ChatCounter:
    return ChatCounter(load_tokenizer(save_tiny_model(tmp_path_factory.mktemp("model"))))


@given(
    turns=some.lists(some.integers(1, 200), min_size=1, max_size=40),
    fixed=some.integers(0, 300),
    context=some.integers(16, 1000),
    max_tokens=some.none() | some.integers(1, 2000),
)
def test_the_newest_turn_is_sent_and_what_is_sent_leaves_room_for_the_answer(
    turns: list[int], fixed: int, context: int, max_tokens: int | None
) -> None:
    window = choose_window(fixed, turns, context, max_tokens)
    assert 0 <= window.first < len(turns)
    whole = fixed + sum(turns[window.first :])
    assert window.prompt_tokens == whole or (window.shares and window.prompt_tokens < whole)
    assert 0 < window.answer_tokens <= context // 4
    fits = window.prompt_tokens + window.answer_tokens <= context
    assert fits or window.first == len(turns) - 1, "what does not fit is the newest turn alone"
    if fixed + sum(turns) + window.answer_tokens <= context:
        assert window.first == 0 and not window.shares, "nothing is left out that fits"


def test_the_beginning_of_the_prompt_stays_the_same_for_several_questions() -> None:
    firsts = [choose_window(20, [50] * count, 1000, 200).first for count in range(1, 60)]
    assert firsts == sorted(firsts)
    changes = sum(one != other for one, other in itertools.pairwise(firsts))
    assert 0 < changes <= len(firsts) / 4, "each change computes the whole prompt anew"


def test_one_long_answer_does_not_drive_out_what_was_said_before_it() -> None:
    said = [50] * 6
    for answer in (300, 500, 700, 5_000):
        window = choose_window(20, [*said, answer, 30], 1000, 200)
        assert window.first <= 3 and window.prompt_tokens <= 800, answer
        assert set(window.shares) == ({6} if answer > 390 else set())
    assert choose_window(20, [*said, 600], 1000, 200).first <= 5, "nor does one long question"


def test_a_long_text_of_an_earlier_turn_is_sent_shortened() -> None:
    long = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "because " * 100}]
    sent = sent_messages([*long, *TALK[2:3]], ChatWindow(shares={0: 0.25}))
    assert [one["content"] for one in (sent[0], sent[2])] == ["Why?", "and the dog"]
    assert 190 < len(sent[1]["content"]) < 205 and sent[1]["content"].endswith(" …")
    assert long[1]["content"] == "because " * 100, "the conversation itself is not changed"


def test_shortened_turns_leave_room_for_the_answer_wherever_their_tokens_are(counter: ChatCounter) -> None:
    texts = ("ξ" * 400 + "the cat sat " * 200, "the cat sat " * 300)
    talk = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    talk = [*talk * 4, {"role": "user", "content": "and the dog"}]
    window = counter.window(talk, 512, 64)
    sent = sent_messages(talk, window)
    assert window.shares and len(sent) > 1
    assert len(counter._tokenizer.render_chat(sent)[1]) <= 512 - 64


def test_counts_are_those_of_the_prompt(counter: ChatCounter) -> None:
    prompt = counter._tokenizer.render_chat([{"role": "system", "content": "be brief"}, *TALK])[1]
    counted = counter.window(TALK, 512, 64, system="be brief").prompt_tokens
    assert len(prompt) <= counted <= len(prompt) + 8


def test_what_is_left_out_is_whole_turns_and_a_summary_stands_for_them() -> None:
    assert [len(turn) for turn in turns_of(TALK)] == [2, 2, 1]
    sent = sent_messages(TALK, ChatWindow(first=1), "be brief", "a cat sat")
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "user"]
    assert sent[1]["content"].endswith("and the dog") and "a cat sat" in sent[1]["content"]
    assert TALK[2]["content"] == "and the dog", "the conversation itself is not changed"


def test_a_summary_is_asked_for_in_as_many_pieces_as_the_context_needs(counter: ChatCounter) -> None:
    talk, context = [*TALK[:4] * 6], 256
    requests, asked = summary_requests(counter, talk, context), []
    try:
        messages = next(requests)
        while True:
            asked.append(messages)
            length = len(counter._tokenizer.render_chat(messages)[1])
            assert length + summary_tokens(context) <= context
            messages = requests.send(f"summary {len(asked)}")
    except StopIteration as end:
        assert end.value == f"summary {len(asked)}" and len(asked) > 1
    assert "summary 1" in asked[1][0]["content"]
    kept = [message for messages in asked for message in messages[:-1] if message["role"] == "assistant"]
    assert len(kept) == 12, "every turn is in one of them"
