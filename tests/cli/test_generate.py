"""`cumulo generate` with the real built-in model."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]


def test_one_prompt_prints_its_completion_and_its_story(cumulo: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = cumulo(
        "generate", "The capital of France is", "--temperature", "0", "--max-tokens", "8", "--why",
        "--json", str(report),
    )  # fmt: skip
    assert ran.code == 0
    assert "Paris" in ran.out
    assert "arrived with" in ran.err
    assert "tok/s" in ran.err
    content = json.loads(report.read_text())
    (output,) = content["outputs"]
    (sample,) = output["samples"]
    assert sample["text"] in ran.out
    assert len(sample["token_ids"]) == 8
    assert sample["finish_reason"] == "length"
    assert output["story"]["ttft_s"] > 0
    assert {row["name"] for row in content["rows"]} >= {"output tokens per second", "time"}


def test_a_file_of_json_lines_runs_as_one_batch(cumulo: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "1, 2, 3, 4,", "id": "count", "max_tokens": 6},
        {"prompt": "Hello", "n": 2, "temperature": 1.0, "seed": 3},
        {"prompt": ""},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    ran = cumulo("generate", "--file", str(prompts), "--temperature", "0", "--max-tokens", "4", "--json", "-")
    assert ran.code == 1, "one of the prompts is empty"
    assert "prompt 3: the prompt is empty" in ran.err
    outputs = json.loads(ran.out)["outputs"]
    assert outputs[0]["id"] == "count"
    assert "5" in outputs[0]["samples"][0]["text"]
    assert [len(sample["token_ids"]) for sample in outputs[1]["samples"]] == [4, 4]
    assert outputs[2]["samples"] == []


def test_the_chat_template_is_applied_on_request(cumulo: Run) -> None:
    ran = cumulo("generate", "What is the capital of France?", "--chat", "--temperature", "0")
    assert "Paris" in ran.out


def test_log_probabilities_are_reported(cumulo: Run) -> None:
    ran = cumulo("generate", "Two plus two is", "--max-tokens", "2", "--logprobs", "3", "--json", "-")
    (output,) = json.loads(ran.out)["outputs"]
    entries = output["samples"][0]["logprobs"]
    assert len(entries) == 2
    assert all(entry["logprob"] <= 0 and len(entry["top"]) == 3 for entry in entries)


def test_without_options_the_authors_sampling_is_used_and_a_chat_model_says_how_it_is_asked(
    cumulo: Run,
) -> None:
    prompt = ("generate", "The three primary colours are", "--max-tokens", "24", "--seed", "5")
    plain = cumulo(*prompt)
    assert "is made to answer messages" in plain.err and "--chat asks it instead" in plain.err
    assert plain.out == cumulo(*prompt, "--temperature", "0.1", "--top-p", "0.5").out
    assert plain.out != cumulo(*prompt, "--temperature", "1", "--top-p", "1").out
    assert "--chat asks it" not in cumulo(*prompt, "--chat").err
