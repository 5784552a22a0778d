"""JSON files of a model folder, read within bounds or written. Used by all that opens a Hugging Face folder.

A model's files are someone else's: a file may be gigabytes long, nested a million deep, of empty lists only, or no
regular file at all.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cumulo.errors import ModelError

MOST_BYTES = 64 << 20  # of a configuration; an index of a million tensors has about as much
_MOST_LISTS = 1 << 21  # objects and lists: each takes 64 bytes of memory or more, and two in the file
_MOST_VALUES = 1 << 22  # the tokenizer with the most merges has 1.4 million
_MOST_ENDS = 64


def shown(value: Any) -> str:
    """A value from a file for an error message: one line of a sensible length."""
    return reprlib.repr(value)


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    if not path.exists():
        return {}
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file")
        if (size := path.stat().st_size) > most_bytes:
            raise ModelError(f"{path} has {size:,} bytes; the maximum is {most_bytes:,}")
        text = path.read_text("utf-8")
        if text.count("[") + text.count("{") > _MOST_LISTS or text.count(",") > _MOST_VALUES:
            raise ModelError(
                f"{path} has more than {_MOST_LISTS:,} lists and objects or {_MOST_VALUES:,} values, which would "
                "take far more memory than the file's size"
            )
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must contain a JSON object, not {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes as Hugging Face does: indented by two, with a last newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def token_ids(value: Any, where: str, vocabulary: int) -> list[int]:
    """The tokens that a field such as eos_token_id names: none, one or several, all in the vocabulary."""
    found = value if isinstance(value, list) else [] if value is None else [value]
    if len(found) > _MOST_ENDS:
        raise ModelError(f"{where} lists {len(found):,} tokens; the maximum is {_MOST_ENDS}")
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ModelError(f"{where} must be a token's number or a list of them, got {shown(token)}")
    return in_vocabulary(found, where, vocabulary)


def in_vocabulary(tokens: Iterable[int], where: str, vocabulary: int) -> list[int]:
    found = list(tokens)
    for token in found:
        if not 0 <= token < vocabulary:
            raise ModelError(
                f"{where} names token {shown(token)}, but the vocabulary has {vocabulary:,} tokens (0 to "
                f"{vocabulary - 1:,}); the files do not belong together, download the model again"
            )
    return found
