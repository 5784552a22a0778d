"""JSON schemas written by hand for the tests of guided decoding: one idea each."""

from typing import Any


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
        **more,
    }


INTEGER, STRING, NUMBER, BOOLEAN = ({"type": kind} for kind in ("integer", "string", "number", "boolean"))
SHORT = {"type": "string", "maxLength": 6}

SCHEMAS: dict[str, Any] = {
    "a boolean": BOOLEAN,
    "null": {"type": "null"},
    "a short string": SHORT,
    "a string of exact length": {"type": "string", "minLength": 5, "maxLength": 5},
    "an integer": INTEGER,
    "a positive integer": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9999},
    "a narrow range": {"type": "integer", "minimum": 17, "maximum": 23},
    "a negative range": {"type": "integer", "minimum": -105, "maximum": -98},
    "a number in bounds": {"type": "number", "minimum": -1.5, "maximum": 1.5},
    "a number with open bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "a multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "an enumeration": {"enum": ["red", "green", "blue"]},
    "an enumeration of kinds": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "a constant": {"const": {"version": 2, "tags": ["x"]}},
    "a pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "a pattern with choices": {"type": "string", "pattern": "^(cat|dog|bird)s?$"},
    "a date": {"type": "string", "format": "date"},
    "a uuid": {"type": "string", "format": "uuid"},
    "an IPv4 address": {"type": "string", "format": "ipv4"},
    "a list of integers": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    "a tuple": {"type": "array", "prefixItems": [SHORT, INTEGER, BOOLEAN], "items": False, "minItems": 3},
    "a list of lists": {
        "type": "array",
        "maxItems": 3,
        "items": {"type": "array", "items": BOOLEAN, "maxItems": 2},
    },
    "an object": _object({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    "optional fields": _object({"a": INTEGER, "b": SHORT, "c": BOOLEAN}, ["b"]),
    "only optional fields": _object({"a": BOOLEAN, "b": BOOLEAN}, []),
    "nested objects": _object({"outer": _object({"inner": _object({"value": {"enum": ["deep"]}})})}),
    "a choice of types": {"type": ["integer", "null", "boolean"]},
    "any of": {
        "anyOf": [INTEGER, _object({"id": INTEGER}), {"type": "array", "items": BOOLEAN, "maxItems": 2}]
    },
    "tagged variants": {
        "anyOf": [
            _object({"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0}}),
            _object({"kind": {"const": "square"}, "side": {"type": "number", "minimum": 0}}),
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "definitions": {
        "$defs": {"point": _object({"x": INTEGER, "y": INTEGER})},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "minItems": 1,
        "maxItems": 2,
    },
    "a recursive tree": {
        "$defs": {
            "node": _object(
                {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "children": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/node"}},
                }
            )
        },
        "$ref": "#/$defs/node",
    },
    "a map": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,3}$": {"type": "integer", "minimum": 0, "maximum": 99}},
        "additionalProperties": False,
    },
    "additional numbers": {
        "type": "object",
        "properties": {"total": INTEGER},
        "required": ["total"],
        "additionalProperties": BOOLEAN,
    },
    "escapes in names": _object({'with "quotes"': BOOLEAN, "tab\there": BOOLEAN, "ünï": BOOLEAN}),
}
