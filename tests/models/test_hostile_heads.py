"""Speculation heads of strangers are refused in one line: their numbers become tokens of the served model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.models.heads.eagle import EagleHead
from cumulo.models.heads.files import load_eagle, save_eagle
from tests.engine.tiny_engine import SPECS

SPEC = SPECS["dense"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head = EagleHead(replace(SPEC, layers=1), 3 * SPEC.hidden, 16)
    head.token_of = torch.arange(16)
    for parameter in head.parameters():
        parameter.data.zero_()
    save_eagle(tmp_path, head)
    assert load_eagle(tmp_path, SPEC).token_of.tolist() == list(range(16))
    return tmp_path


@pytest.mark.parametrize("count", [10**9, SPEC.vocab_size + 1, 0, -1, 1.5, True, "x", [1]])
def test_a_vocabulary_that_is_none_is_refused_before_it_takes_memory(folder: Path, count: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "draft_vocab_size": count}))
    with pytest.raises(ModelError, match="draft_vocab_size must be 1 to"):
        load_eagle(folder, SPEC)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("d2t", lambda numbers: numbers + 10**12, "does not have"),
        ("d2t", lambda numbers: numbers - 1, "does not have"),
        ("d2t", lambda numbers: numbers.float() * float("nan"), "does not have"),
        ("d2t", lambda numbers: numbers[:3].clone(), "cannot be read"),
        ("fc.weight", lambda weight: weight[0, 0].clone(), "cannot be read"),
        ("fc.weight", lambda weight: weight[:1].clone(), "has shape"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    folder: Path, name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    path = folder / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    save_file({**tensors, name: change(tensors[name])}, path)
    with pytest.raises(ModelError, match=message):
        load_eagle(folder, SPEC)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, (1 << 62).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_no_safetensors_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read"):
        load_eagle(folder, SPEC)
