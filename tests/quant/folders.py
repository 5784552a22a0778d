"""A tiny model folder with a tokenizer, for the tests that quantise and load one."""

from pathlib import Path
from typing import Any

import torch

from cumulo.models.files.load import load_model
from cumulo.train.data.prepare import byte_tokenizer, save_tokenizer
from tests.models import tiny
from tests.models.stepper import Stepper

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 12
SIZE = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 259, "num_hidden_layers": 2}


def tiny_folder(folder: Path, family: str = "smollm2", **changes: Any) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} if family == "smollm2" else {}
    tiny.save(family, folder, **{**SIZE, **heads, **changes})
    save_tokenizer(byte_tokenizer(), folder, chat=True)
    return folder


def calibration_file(folder: Path) -> Path:
    file = folder / "calibration.txt"
    file.write_text(TEXT, "utf-8")
    return file


def logits(folder: Path, keep_quantised: bool = True) -> torch.Tensor:
    loaded = load_model(folder, keep_quantised=keep_quantised)
    tokens = list(TEXT[:24].encode())  # the tokenizer is one of bytes
    return Stepper(loaded.decoder).step({"a": tokens})["a"]
