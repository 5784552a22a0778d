"""A model whose chat template means harm: completions are served, chats refused, and the server ends when told."""

import contextlib
import json
import signal
import threading
from pathlib import Path

import httpx
import pytest

from tests.serve.running_server import RunningServer, running_server, wait_for
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long

# Two lists that contain themselves twice over are compared item by item: no check of sizes foresees it.
COMPARING = (
    "{% set ns = namespace(a=['x'], b=['x']) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
)
ON_REQUEST = (
    f"{{% if messages[0].content == 'boom' %}}{COMPARING}{{% endif %}}{{{{ messages[0].content | trim }}}}"
)


def model_with(template: str, folder: Path) -> Path:
    model = save_tiny_model(folder)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return model


def chat(server: RunningServer, content: str) -> httpx.Response:
    body = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return server.post("/v1/chat/completions", body)


@pytest.mark.long
def test_completions_are_served_and_chats_are_refused_at_once(tmp_path: Path) -> None:
    with running_server(str(model_with(COMPARING, tmp_path)), "--no-console") as server:
        _check_refusals(server)


def _check_refusals(hostile: RunningServer) -> None:
    lines = [line for line in hostile.log.splitlines() if "chat template was stopped" in line]
    assert len(lines) == 1 and "--chat-template" in lines[0], hostile.log
    completion = hostile.post("/v1/completions", {"model": NAME, "prompt": "Hi", "max_tokens": 2})
    assert completion.status_code == 200
    chat(hostile, "Hi")
    for _ in range(20):  # a template that was stopped twice is not run again
        answer = chat(hostile, "Hi")
        assert answer.status_code == 400 and "is not run again" in answer.json()["error"]["message"]


def test_the_server_answers_others_and_ends_during_a_hostile_rendering(tmp_path: Path) -> None:
    with running_server(
        str(model_with(ON_REQUEST, tmp_path)), "--no-console", "--drain-timeout", "20"
    ) as server:
        assert chat(server, "Hi").status_code == 200
        answers: list[httpx.Response] = []
        hostile = threading.Thread(target=lambda: answers.append(chat(server, "boom")))
        hostile.start()
        assert server.get("/health").status_code == 200
        assert chat(server, "Hello").status_code == 200
        hostile.join()
        assert answers[0].status_code == 400 and "it takes more than" in answers[0].json()["error"]["message"]
        last = threading.Thread(target=lambda: _ignore_end(server))
        last.start()
        wait_for(lambda: server.get("/health").status_code == 200, "the server", server)
        assert server.end(signal.SIGTERM) == 0
        last.join()


def _ignore_end(server: RunningServer) -> None:
    with contextlib.suppress(httpx.TransportError):
        chat(server, "boom")
