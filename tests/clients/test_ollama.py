"""Ollama's official Python client against a real server: what `programs/ollama_client.py` got is judged here."""

import json
import os
import subprocess
from typing import Any

import pytest

from tests.clients.test_frameworks import PROGRAMS, PYTHON, _installed
from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

pytestmark = [needs_built_in_model, pytest.mark.long]
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def outcome(server: RunningServer) -> Any:
    if "ollama" not in _installed().split():
        pytest.skip(f"ollama is not installed in {PYTHON.parents[1]}: `make test` installs it there")
    done = subprocess.run(
        [PYTHON, PROGRAMS / "ollama_client.py", f"{server.url}/v1", MODEL],
        capture_output=True, text=True, timeout=600, env=os.environ | {"NO_PROXY": "*"}, cwd=PROGRAMS,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{server.log[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_models_are_listed_shown_and_said_to_be_running(outcome: Any) -> None:
    name, family, quantization, size = outcome["listed"]
    assert (name, family, quantization) == (f"{MODEL}:latest", "llama", "Q4_1") and size > 9e7
    assert outcome["shown"] == ["gguf", ["completion", "embedding", "tools"], 8192] and outcome["template"]
    assert outcome["running"] == [f"{MODEL}:latest", 8192, True]


def test_a_chat_is_answered_whole_and_in_pieces_with_counts_and_durations(outcome: Any) -> None:
    assert outcome["chat"] == outcome["streamed"] == outcome["generated"] == PARIS
    prompt_tokens, output_tokens, reason = outcome["counts"]
    assert (prompt_tokens, reason) == (37, "stop") and 6 < output_tokens < 12
    total, load, prompt, output = outcome["durations"]
    assert total >= prompt + output > 0 <= load
    pieces, ends, counted = outcome["chunks"]
    assert pieces >= output_tokens and ends == [False, True] and counted == output_tokens


def test_options_are_mapped(outcome: Any) -> None:
    assert outcome["cut"] == [2, "length"]
    assert outcome["logprobs"] == [2, 2]
    assert outcome["raw"].startswith(" Paris")


def test_a_format_is_kept_and_tools_are_called(outcome: Any) -> None:
    assert outcome["formed"].keys() == {"city", "large"} and isinstance(outcome["formed"]["large"], bool)
    assert outcome["called"] == outcome["called_streaming"] == [["temperature", {"city": "Paris"}]]
    assert "21" in outcome["after"]


def test_texts_are_embedded(outcome: Any) -> None:
    assert outcome["embedded"] == [2, 576, 2] and outcome["same"] < 1e-5


def test_an_empty_prompt_loads_the_model(outcome: Any) -> None:
    assert outcome["loaded"] == "load"


def test_errors_have_ollamas_form(outcome: Any) -> None:
    refused = outcome["refused"]
    assert {name: status for name, (status, _) in refused.items()} == {
        "unknown": 404, "image": 400, "keep_alive": 400, "bad": 400, "streamed": 404,
    }  # fmt: skip
    assert "reads text only" in refused["image"][1]
    assert "options.temperature" in refused["bad"][1]
    assert "not served here" in refused["streamed"][1]
