"""Ids of tool calls: random, except that a request which may be continued by another server has the same there."""

import random
import secrets
import string
from contextvars import ContextVar

_CHARACTERS = string.ascii_letters + string.digits
_source: ContextVar[random.Random] = ContextVar("source of tool call ids")
_secret = random.SystemRandom()


def repeatable(seed: str) -> None:
    """From here on, in this task, ids follow from the seed."""
    _source.set(random.Random(seed))


def random_call_id() -> str:
    source = _source.get(None)
    return f"call_{secrets.token_hex(12) if source is None else source.randbytes(12).hex()}"


def mistral_call_id() -> str:
    """Nine letters and digits: Mistral's own templates refuse other ids."""
    return "".join((_source.get(_secret)).choice(_CHARACTERS) for _ in range(9))
