"""Hostile model files are refused in one line, before memory is taken: all in one process with little memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.llm import LLM
from tests import processes
from tests.cli.conftest import cumulo_process
from tests.models import tiny
from tests.models.gguf_conversion import convert
from tests.models.hostile_files import FOLDER_CASES, GGUF_CASES
from tests.models.vocabularies import sentencepiece_metadata
from tests.serve.tiny_model import save_tiny_model

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    base = tmp_path_factory.mktemp("hostile")
    good = save_tiny_model(base)
    (base / "scratch").mkdir()
    paths = map(str, (good, base / "scratch", *_gguf(base)))
    with (base / "told.jsonl").open("w") as told:
        process = processes.start_module("tests.models.hostile_files", *paths, stdout=told)
        try:
            code = process.wait(300)
        finally:
            process.kill()
    lines = [json.loads(line) for line in (base / "told.jsonl").read_text().splitlines()]
    assert code == 0, f"after {lines[-1:]}"
    return {line["name"]: line for line in lines}


def _gguf(base: Path) -> list[Path]:
    vocabulary = sentencepiece_metadata()
    size = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": len(vocabulary["tokenizer.ggml.tokens"]),
    }
    tiny.save("llama", base / "for-gguf", **size)
    files = []
    for name, changes in GGUF_CASES.items():
        metadata = vocabulary | changes
        if changes.get("tokenizer.ggml.tokens") == "long":
            metadata["tokenizer.ggml.tokens"] = [*vocabulary["tokenizer.ggml.tokens"][:-1], "x" * 100_000]
        files.append(convert(base / "for-gguf", base / f"{name}.gguf", metadata=metadata))
    return files


@pytest.mark.parametrize("name", [*FOLDER_CASES, *GGUF_CASES])
def test_a_hostile_file_is_refused_in_one_line(found: dict[str, dict[str, Any]], name: str) -> None:
    line = found[name]
    assert line["kind"] == "refused", line
    assert "\n" not in line["message"] and len(line["message"]) < 700, line
    assert line["grown_mib"] < 300, line


@pytest.mark.long
def test_serve_says_why_in_one_line_and_ends(tmp_path: Path) -> None:
    good = save_tiny_model(tmp_path)
    FOLDER_CASES["added id 2147483648"](good)
    refused = cumulo_process("serve", str(good), "--port", "0", "--no-console")
    assert refused.code != 0
    assert "Traceback" not in refused.err + refused.out
    assert "2147483648" in " ".join((refused.err + refused.out).split())


def test_a_claimed_context_takes_no_memory_for_angles(tmp_path: Path) -> None:
    """The longest context a file may claim, served with a short one."""
    good = save_tiny_model(tmp_path, max_context=1 << 27)
    with LLM(good, config=EngineConfig(max_context=64, kv_blocks=8, threads=1)) as llm:
        answer = llm.generate("the cat", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0]
        table = llm._assembly.model.decoder.rotary.table
        assert table is not None and len(table[0]) == 65
    with LLM(save_tiny_model(tmp_path / "short"), config=EngineConfig(kv_blocks=32, threads=1)) as llm:
        usual = llm.generate("the cat", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0]
    assert answer.text == usual.text
