"""Applications with LangChain, LlamaIndex, litellm, instructor, OpenAI's Agents SDK, Pydantic AI, Outlines,
guidellm and Vercel's AI SDK against a real server.

Each framework has a program in programs/ that uses it as its documentation says, and runs in an environment of the
frameworks' own (requirements.txt). Here it is judged what they got: a tool loop, a stream and an object each.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import MODEL, RunningServer, needs_built_in_model

PYTHON = Path(sys.prefix) / "clients" / "bin" / "python"
PROGRAMS = Path(__file__).parent / "programs"
# Nothing is fetched and nothing is reported to anybody: the tests need no network.
QUIET = {
    "ANONYMIZED_TELEMETRY": "False",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
ANN = {"name": "Ann", "age": 42}

pytestmark = [needs_built_in_model, pytest.mark.long]


@cache
def _installed() -> str:
    """The names of what is installed there: importing it all would take half a minute."""
    return subprocess.check_output([PYTHON, "-c", _LIST], text=True) if PYTHON.exists() else ""


_LIST = """
from importlib.metadata import distributions

for one in distributions():
    print(one.metadata["Name"])
"""


@pytest.fixture(scope="session")
def outcomes() -> dict[str, Any]:
    return {}


@pytest.fixture
def outcome(request: pytest.FixtureRequest, server: RunningServer, outcomes: dict[str, Any]) -> Any:
    """What the program of this test's framework printed; it runs once."""
    name, package = request.param
    if package not in _installed().split():
        pytest.skip(f"{package} is not installed in {PYTHON.parents[1]}: `make test` installs it there")
    if name not in outcomes:
        done = subprocess.run(
            [PYTHON, PROGRAMS / f"{name}_client.py", f"{server.url}/v1", MODEL],
            capture_output=True, text=True, timeout=600, env=os.environ | QUIET, cwd=PROGRAMS,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{server.log[-3000:]}"
        outcomes[name] = json.loads(done.stdout.splitlines()[-1])
    return outcomes[name]


def of(*names: tuple[str, str]) -> pytest.MarkDecorator:
    cases = [
        pytest.param(
            case, id=case[0], marks=[pytest.mark.thorough if case in LIKE_OTHERS else pytest.mark.long]
        )
        for case in names
    ]
    return pytest.mark.parametrize("outcome", cases, indirect=True)


LANGCHAIN, LLAMAINDEX = ("langchain", "langchain-openai"), ("llamaindex", "llama-index-llms-openai-like")
LITELLM, INSTRUCTOR, AGENTS = (
    ("litellm", "litellm"),
    ("instructor", "instructor"),
    ("agents", "openai-agents"),
)
PYDANTIC_AI, OUTLINES = ("pydanticai", "pydantic-ai-slim"), ("outlines", "outlines")
GUIDELLM = ("guidellm", "guidellm")
# What they send, others send, too: langchain, tests/serve/responses/test_agents.py, and for litellm's rerank
# tests/serve/rank. To import litellm alone takes as long as all else that it does.
LIKE_OTHERS = (LLAMAINDEX, AGENTS, LITELLM)


def judge_loop(loop: dict[str, Any]) -> None:
    assert loop["calls"][0]["args"] == {"city": "Paris"} and loop["answer"]


def judge_stream(stream: dict[str, Any]) -> None:
    assert stream["pieces"] > 3 and stream["joined"] == stream["whole"] and "Paris" in stream["whole"]
    assert len(set(stream.get("output_tokens", [1]))) == 1


@of(LANGCHAIN, LLAMAINDEX, LITELLM, INSTRUCTOR)
def test_a_tool_is_called_and_its_result_answered(outcome: Any) -> None:
    judge_loop(outcome["tool_loop"])


@of(LANGCHAIN, LLAMAINDEX, LITELLM, OUTLINES)
def test_a_stream_is_the_answer_in_pieces(outcome: Any) -> None:
    judge_stream(outcome["streaming"])


@of(LANGCHAIN, LLAMAINDEX, LITELLM, INSTRUCTOR, OUTLINES)
def test_an_answer_is_an_object_of_the_class_asked_for(outcome: Any) -> None:
    for way, person in outcome["structured"].items():
        assert set(person) == {"name", "age"} and person["name"] in ("Ann", "Bob"), way
        assert isinstance(person["age"], int), way
    assert ANN in outcome["structured"].values()


@of(INSTRUCTOR)
def test_an_object_is_streamed_as_it_grows(outcome: Any) -> None:
    for way, partial in outcome["partial"].items():
        assert partial["pieces"] > 2 and set(partial["last"]) == {"name", "age"}, way
        assert partial["last"] == outcome["structured"][way]


@of(OUTLINES)
def test_outlines_gets_expressions_choices_and_grammars(outcome: Any) -> None:
    assert outcome["forms"] == {"regex": True, "choice": True, "grammar": True}


@of(INSTRUCTOR)
def test_instructor_gets_an_object_by_responses_too(outcome: Any) -> None:
    assert outcome["responses"] == ANN


@of(GUIDELLM)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_measures_every_request(outcome: Any, path: str) -> None:
    measured = outcome[path]
    assert measured["requests"] == {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
    assert 0 < measured["output_tokens"] <= 8 and measured["first_token_ms"] > 0


@of(LANGCHAIN)
def test_a_streamed_tool_call_is_put_together(outcome: Any) -> None:
    call = outcome["streamed_tool_call"][0]
    assert call["name"] == "temperature" and call["args"] == {"city": "Rome"} and call["id"]


@of(LANGCHAIN, LITELLM)
def test_texts_are_embedded(outcome: Any) -> None:
    assert outcome["embedded"] == {"same": True, "different": True, "size": 576}


@of(LITELLM)
def test_litellm_reranks_and_passes_on_what_other_providers_know(outcome: Any) -> None:
    assert outcome["reranked"][0] == 1 and len(outcome["reranked"]) == 2
    assert outcome["cached_parts"] == outcome["streaming"]["whole"]


@of(AGENTS, PYDANTIC_AI)
@pytest.mark.parametrize("way", ["chat", "responses"])
def test_an_agent_calls_tools_streams_and_gives_objects(outcome: Any, way: str) -> None:
    judge_loop(outcome[way]["tool_loop"])
    judge_stream(outcome[way]["streaming"])
    structured = outcome[way]["structured"]
    assert ANN in (structured, *structured.values()) and structured.get("tool", ANN) == ANN


def test_vercels_sdk_calls_tools_streams_and_gives_objects(server: RunningServer) -> None:
    """By /v1/messages and by /v1/chat/completions."""
    folder, node = Path(sys.prefix) / "clients-js", shutil.which("node")
    if node is None or not (folder / "node_modules" / "ai").exists():
        pytest.skip(
            "Node.js or the AI SDK is not installed: `make test-long` installs the SDK where there is npm"
        )
    done = subprocess.run(
        [node, PROGRAMS / "vercel_client.mjs", f"{server.url}/v1", MODEL],
        capture_output=True, text=True, timeout=600, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{server.log[-3000:]}"
    for told in json.loads(done.stdout.splitlines()[-1]).values():
        judge_loop(told["tool_loop"])
        judge_stream(told["streaming"])
        assert told["structured"] == ANN
