"""Reasoning is told from the answer, however the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.serve.formats.events import Text
from cumulo.serve.formats.reasoning import Reasoning, ReasoningParser, detect_reasoning, opens_reasoning
from tests import thorough
from tests.serve.formats.event_tools import cut, parse

PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</", "<", "hm", "so ", " ", "\n", "<tool_call>", "é"]),
    max_size=9,
).map("".join)


@settings(max_examples=thorough.examples(400), deadline=None)
@given(text=PIECES, cuts=st.lists(st.integers(0, 100), max_size=8), opened=st.booleans())
def test_how_an_answer_is_cut_does_not_matter(text, cuts, opened):
    whole = parse(ReasoningParser(opened=opened), [text])
    assert parse(ReasoningParser(opened=opened), cut(text, cuts)) == whole
    assert parse(ReasoningParser(opened=opened), list(text)) == whole


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, [Reasoning("Hm."), Text("Yes.")]),
        ("\n<think>a < b</think>c </think> d", False, [Reasoning("a < b"), Text("c </think> d")]),
        ("Hm.\n</think>\nYes.", True, [Reasoning("Hm."), Text("Yes.")]),
        ("\n</think>\n\nYes.", True, [Text("Yes.")]),
        ("never closed </thin", True, [Reasoning("never closed </thin")]),
        ("No thoughts <think>here</think>", False, [Text("No thoughts <think>here</think>")]),
        (" <thin", False, [Text(" <thin")]),
        ("", False, []),
    ],
)
def test_what_is_reasoning_and_what_is_the_answer(text, opened, expected):
    assert parse(ReasoningParser(opened=opened), list(text)) == expected


@settings(max_examples=thorough.examples(100), deadline=None)
@given(text=st.text("ab <>/\n", max_size=20))
def test_an_answer_without_reasoning_comes_back_as_it_was(text):
    assert parse(ReasoningParser(), list(text)) == ([Text(text)] if text else [])


def test_templates_say_whether_a_model_thinks_and_prompts_whether_it_has_begun():
    assert detect_reasoning("{{ content.split('</think>')[-1] }}")
    assert not detect_reasoning("{{ content }}")
    assert not detect_reasoning(None)
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
