"""Validation that stops at the first mistake where there may be a million. Used by Strict, for every request body.

Pydantic collects all errors of a list and of a dictionary before it tells any; a client is told one.
"""

from typing import Any

from pydantic_core import PydanticKnownError, core_schema


def stopping_early(schema: Any) -> Any:
    """A validation schema whose lists stop at their first wrong item and whose dictionaries are counted first:
    otherwise a list of a million wrong items makes a million errors, of which one is told."""
    if isinstance(schema, list):
        return [stopping_early(part) for part in schema]
    if isinstance(schema, tuple):
        return tuple(stopping_early(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    early = {name: part if name == "metadata" else stopping_early(part) for name, part in schema.items()}
    if early.get("type") == "list":
        early["fail_fast"] = True
    if early.get("type") == "dict" and early.get("max_length") is not None:
        return core_schema.no_info_before_validator_function(_counted(early["max_length"]), early)
    return early


def _counted(most: int) -> Any:
    def count(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticKnownError(
                "too_long", {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            )
        return value

    return count
