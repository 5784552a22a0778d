"""The calibration text: what a model reads while it is quantised, so that a method knows which inputs matter.

Without a file it is part of the Python language reference, which every Python has; the rest of it is held out for
`cumulo bench quality`.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from cumulo.base.reference_text import reference_text
from cumulo.errors import ConfigError
from cumulo.models.text.tokenizer import Tokenizer

LEAST_TOKENS = 256


def calibration_text(file: Path | None) -> str:
    """Of a text file, or of the `text` (or the messages' contents) of each line of a .jsonl file."""
    if file is None:
        return reference_text("calibration")
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"the calibration file {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the calibration file {file} is not UTF-8 text (byte {error.start})") from error
    if file.suffix == ".jsonl":
        text = "\n\n".join(
            _line_text(line, file, number) for number, line in enumerate(text.splitlines(), 1) if line
        )
    if not text.strip():
        raise ConfigError(f"the calibration file {file} contains no text")
    return text


def _line_text(line: str, file: Path, number: int) -> str:
    try:
        entry = json.loads(line)
        if isinstance(entry.get("text"), str):
            return str(entry["text"])
        return "\n".join(str(message["content"]) for message in entry["messages"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}, line {number}: expected an object with `text`, or with `messages` that have `content`"
        ) from error


def calibration_tokens(tokenizer: Tokenizer, text: str, sequences: int, length: int) -> Tensor:
    """[sequences, length], spread evenly over the text; fewer sequences where it is short."""
    tokens = tokenizer.encode(text, parse_special_tokens=False)
    if len(tokens) < LEAST_TOKENS:
        raise ConfigError(
            f"the calibration text has {len(tokens)} tokens; give at least {LEAST_TOKENS:,}, better some thousands"
        )
    length = min(length, len(tokens))
    sequences = max(1, min(sequences, len(tokens) // length))
    step = (len(tokens) - length) // max(1, sequences - 1) if sequences > 1 else 0
    return torch.tensor([tokens[step * index : step * index + length] for index in range(sequences)])
