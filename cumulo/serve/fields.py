"""Strict: the base of every request body. A field that is unknown or not supported is refused by name.

Neutral values are no request for anything: null for any field that OpenAI's API has and this server has not,
and the few defaults named in `neutral`, are taken as left out.
"""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Fields of OpenAI's API that are not supported, each with the values that ask for nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name not in cls.neutral:
                kept[name] = value
            elif value is not None and not any(
                type(value) is type(harmless) and value == harmless for harmless in cls.neutral[name]
            ):
                raise PydanticCustomError(
                    "unsupported", "'{name}' is not supported by this server; leave it out", {"name": name}
                )
        return kept
