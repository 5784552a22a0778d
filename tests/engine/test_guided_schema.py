"""What llguidance would let through in silence is refused by name, or made exact."""

import json
from datetime import date, datetime, time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.params import Guide
from cumulo.engine.guides.grammar import enforceable
from cumulo.errors import InvalidRequest
from tests import thorough
from tests.engine.guided_engine import GUIDANCE

pytest.importorskip("llguidance")


def takes(schema, text: str) -> bool:
    """Whether the schema's guide lets this text through, from its beginning to its end."""
    matcher = GUIDANCE.matcher(Guide("json_schema", json.dumps(schema)))
    tokens = list(text.encode())  # the test vocabulary's first tokens are the bytes
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"disallow": "integer"}, "'disallow'.*draft 3"),
        ({"properties": {"a": {"divisibleBy": 2}}}, "'divisibleBy'.*multipleOf"),
        ({"anyOf": [{"extends": {"maximum": 3}}]}, "'extends'.*allOf"),
        ({"format": "date", "formatMinimum": "2020-01-01"}, "'formatMinimum'.*ajv"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft 4 and later"),
        ({"type": "string", "maxlength": 3}, "'maxlength'.*write 'maxLength'"),
        ({"items": {"additional_properties": False}}, "'additional_properties'.*'additionalProperties'"),
        ({"type": "object", "minProperties": 2}, "minProperties 2.*repeat"),
        ({"required": ["a", "a"], "minProperties": 3}, "minProperties 3"),
    ],
)
def test_what_would_not_be_enforced_is_refused_by_name(schema, reason):
    with pytest.raises(InvalidRequest, match=reason):
        GUIDANCE.check(Guide("json_schema", json.dumps(schema)))
    GUIDANCE.check(Guide("json_schema", json.dumps({**schema, "x-guidance": {"lenient": True}})))


def test_a_malformed_schema_is_refused_not_stumbled_over():
    schema = {
        "format": "date",
        "pattern": "x",
        "allOf": 3,
        "required": 1,
        "minProperties": "2",
        "items": None,
    }
    with pytest.raises(InvalidRequest):
        GUIDANCE.check(Guide("json_schema", json.dumps(schema)))


def test_names_of_properties_and_values_are_not_taken_for_keywords():
    names = {"disallow": {"type": "integer"}, "maxlength": {"enum": [{"extends": 1, "format": "date"}]}}
    assert enforceable({"properties": names, "default": {"divisibleBy": 2}})["properties"] == names
    assert takes({"required": ["a"], "minProperties": 2}, '{"a":1,"b":2}')


def test_the_users_schema_is_left_as_it_is():
    schema = {"items": {"format": "date", "pattern": "^2"}, "x": [{"y": 1}]}
    before = json.dumps(schema)
    made = enforceable(schema)
    assert json.dumps(schema) == before
    made["x"][0]["y"] = 2
    assert schema["x"][0]["y"] == 1


@settings(max_examples=thorough.examples(300), deadline=None)
@given(
    year=st.integers(0, 9999),
    month=st.integers(0, 13),
    day=st.sampled_from([0, 1, 9, 10, 28, 29, 30, 31, 32]),
)
def test_a_date_is_one_that_the_calendar_has(year, month, day):
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        exists = bool(date.fromisoformat(text))
    except ValueError:
        exists = False
    assert takes({"format": "date"}, json.dumps(text)) == exists
    stamp = f"{text}T23:59:59.5+01:30"
    assert takes({"type": "string", "format": "date-time"}, json.dumps(stamp)) == exists
    if exists:
        datetime.fromisoformat(stamp)


@pytest.mark.parametrize(
    ("text", "fits"),
    [("00:00:00Z", True), ("23:59:59.123456789-12:00", True), ("24:00:00Z", False), ("12:60:00Z", False),
     ("23:59:60Z", False), ("12:00:00", False), ("12:00:00.Z", False), ("12:00:00+24:00", False)],
)  # fmt: skip
def test_a_time_has_no_sixtieth_second(text, fits):
    assert takes({"format": "time"}, json.dumps(text)) == fits
    if fits:
        assert time.fromisoformat(text[:8])


def test_a_format_and_a_pattern_hold_together():
    schema = {"type": "string", "format": "date", "pattern": "^19"}
    assert takes(schema, '"1999-12-31"')
    assert not takes(schema, '"2000-01-01"') and not takes(schema, '"1999-02-29"')


@pytest.mark.parametrize("text", ['{"a":1,"\\u0061":"x"}', '{"a":1,"a":"x"}', '{"\\u0061":1}'])
def test_a_property_cannot_come_back_under_another_spelling(text):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert takes(schema, '{"a":1,"b":"x"}')
    assert not takes(schema, text)


def test_control_characters_that_a_schema_names_can_be_written():
    assert takes({"const": "a\u0000b"}, r'"a\u0000b"') and not takes({"const": "a\u0000b"}, '"ab"')
    assert takes({"pattern": r"^\x01$"}, r'"\u0001"')


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        (r"^.$", ["a", "\u00e9", "\u0085"], ["\r", "\n", "\u2028", "\u2029", ""]),
        (r"^\s$", [" ", "\t", "\ufeff", "\u00a0", "\u3000"], ["\u0085", "x"]),
        (r"^\S$", ["x", "\u0085"], [" ", "\ufeff"]),
        (r"^[\s\d]$", ["\ufeff", "7"], ["x"]),
        (r"^[\Sx]$", ["x", "y"], [" ", "\ufeff"]),
        (r"^[.\]]\.\\.$", [".." + "\\x", "]." + "\\x"], ["x." + "\\x", ".x" + "\\x"]),
        (r"^\w\W$", ["aé", "_-"], ["éa", "ab"]),
    ],
)
def test_patterns_are_ecmas(pattern, fitting, others):
    for text in fitting:
        assert takes({"pattern": pattern}, json.dumps(text, ensure_ascii=False)), text
    for text in others:
        assert not takes({"pattern": pattern}, json.dumps(text, ensure_ascii=False)), text
    named = {"patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}
    assert takes(named, json.dumps({fitting[0]: 1}, ensure_ascii=False))
    assert not takes(named, json.dumps({others[0]: 1}, ensure_ascii=False))
