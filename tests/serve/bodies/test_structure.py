"""What is counted in a body: exactly what a parser would make of it, whatever stands in its strings."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cumulo.serve.bodies.structure import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, Structure, structure_of
from tests import thorough

odd_texts = st.text(st.sampled_from('{}[],:"\\ \n1éx😀'), max_size=12)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), odd_texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(odd_texts, inner, max_size=4)
    ),
    max_leaves=12,
)  # fmt: skip


def counted(value: Any) -> tuple[int, int, int]:
    """Containers, strings and values, by walking what was parsed."""
    if isinstance(value, str):
        return 0, 1, 1
    if not isinstance(value, dict | list):
        return 0, 0, 1
    inner = list(value.values()) if isinstance(value, dict) else value
    sums = [counted(item) for item in inner]
    keys = len(value) if isinstance(value, dict) else 0
    containers, strings, values_ = (sum(column) for column in zip((0, 0, 0), *sums, strict=True))
    return containers + 1, strings + keys, values_ + 1


@settings(max_examples=thorough.examples(300), deadline=None)
@given(values, st.booleans())
@example(['\\"', '"[', "\\\\"], False)
def test_the_counts_are_those_of_the_parsed_body(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    containers, strings, most_values = counted(value)
    exact = structure_of(body)
    assert (exact.containers, exact.strings) == (containers, strings)
    # An empty container counts as if something were in it; nothing else is counted that is not there.
    assert most_values <= exact.values <= most_values + containers


def excess(body: bytes, most_values: int = MAX_VALUES) -> str | None:
    return structure_of(body).excess(Structure(MAX_CONTAINERS, MAX_STRINGS, most_values))


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[" + b"{}," * 16_384 + b"1]", "objects and lists"),
        (b"[" * 20_000, "objects and lists"),
        (b"[" + b'"",' * 65_537 + b"1]", "strings"),
        (b"[" + b"1," * 327_680 + b"1]", "values"),
        (b'["a",' + b"9" * 70_000 + b"]", "digits"),
    ],
)
def test_too_much_is_said_by_name(body: bytes, what: str) -> None:
    told = excess(body)
    assert told is not None and what in told


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"prompt": "a, b, [c], {d}, " * 200_000}).encode(),  # prose and code have many commas
        json.dumps({"prompt": '"quoted" \\ ' * 100_000}).encode(),
        json.dumps({"prompt": "3" * 1_000_000}).encode(),
        json.dumps({"prompt": list(range(300_000))}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "Hi"}] * 4096}).encode(),
        b"",
    ],
)
def test_honest_bodies_may_pass(body: bytes) -> None:
    assert excess(body) is None


def test_a_long_context_takes_as_many_tokens() -> None:
    body = json.dumps({"prompt": [7] * 1_000_000}).encode()
    assert excess(body) is not None and excess(body, most_values=1_000_100) is None


def test_the_most_itself_is_no_excess() -> None:
    most = Structure(MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES)
    assert most.excess(most) is None
