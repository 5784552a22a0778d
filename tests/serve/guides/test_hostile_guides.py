"""Guides that eat a machine, sent to a real server: they are refused, nothing is left, and others do not notice."""

import contextlib
import json
import os
import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from cumulo.serve.access.keys import new_key
from cumulo.serve.engine_link.guide_checker import MOST_WAITING
from tests.base.sandbox.test_worker import wait_until_gone
from tests.serve.http.raw import Answer, Client, post
from tests.serve.running_server import PATIENCE_S, RunningServer, running_server, wait_for
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long

pytest.importorskip("llguidance")

# Its automaton has a hundred million states.
BOMB = {"type": "integer", "multipleOf": 99999989}
Keys = dict[str, str]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Keys]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return path, {name: new_key(path, name) for name in ("honest", "attacker")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Keys]) -> Iterator[RunningServer]:
    model = save_tiny_model(tmp_path_factory.mktemp("models"))
    with running_server(str(model), "--api-keys", str(keys[0]), "--no-console") as running:
        yield running


_CLIENT = httpx.Client(limits=httpx.Limits(max_connections=None))


def body_of(schema: object) -> dict[str, Any]:
    return {
        "model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }  # fmt: skip


def ask(server: RunningServer, key: str, schema: object, patience_s: float = PATIENCE_S) -> httpx.Response:
    return _CLIENT.post(
        f"{server.url}/v1/chat/completions",
        json=body_of(schema),
        headers={"Authorization": f"Bearer {key}"},
        timeout=patience_s,
    )


def person(number: int) -> object:
    return {
        "type": "object",
        "properties": {f"name{number}": {"type": "string"}},
        "required": [f"name{number}"],
    }


def processes_below(pid: int) -> list[int]:
    """Children and their children."""
    below: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            below += [int(child), *processes_below(int(child))]
    return below


def resident_mib(pids: list[int]) -> float:
    return (
        sum(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            for pid in pids
            if Path(f"/proc/{pid}").exists()
        )
        * os.sysconf("SC_PAGE_SIZE")
        / (1 << 20)
    )


def test_it_is_refused_and_neither_memory_nor_a_busy_process_is_left(
    server: RunningServer, keys: tuple[Path, Keys]
) -> None:
    engine = server.engine_pid()
    assert ask(server, keys[1]["attacker"], person(-1)).status_code == 200
    before_mib = resident_mib([engine, *processes_below(engine)])
    answer = ask(server, keys[1]["attacker"], BOMB)
    assert answer.status_code == 400
    assert "too complex to compile" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "response_format"
    wait_for(
        lambda: resident_mib([engine, *processes_below(engine)]) < before_mib + 100,
        "the end of what the schema took",
        server,
    )


class Flood:
    """Clients of one key that send one hostile schema after the other, all different, and do not wait for long.
    One that is told to come back later goes."""

    def __init__(self, server: RunningServer, key: str, clients: int) -> None:
        self._server, self._key = server, key
        self._numbers = count()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(clients)]
        self.answers: list[httpx.Response] = []
        self.given_up = 0

    def _send(self) -> None:
        while not self._ended.is_set():
            bomb = {**BOMB, "multipleOf": 99999989 + 2 * next(self._numbers)}
            try:
                self.answers.append(ask(self._server, self._key, bomb, patience_s=2))
                if self.answers[-1].status_code == 503:
                    return
            except httpx.TimeoutException:
                self.given_up += 1

    def __enter__(self) -> "Flood":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.long
def test_another_keys_guided_requests_all_succeed_during_a_flood(
    server: RunningServer, keys: tuple[Path, Keys]
) -> None:
    with Flood(server, keys[1]["attacker"], clients=8) as flood, ThreadPoolExecutor(4) as honest:
        wait_for(lambda: flood.given_up, "the flood", server)  # somebody waited in vain
        answers = list(honest.map(lambda n: ask(server, keys[1]["honest"], person(n % 20)), range(40)))
    assert [answer.status_code for answer in answers] == [200] * 40, answers[0].text
    assert {answer.status_code for answer in flood.answers} <= {200, 400, 503}  # some numbers divide by much


def test_a_key_with_too_many_guides_waiting_is_told_when_to_come_back(
    server: RunningServer, keys: tuple[Path, Keys]
) -> None:
    headers = ("Content-Type: application/json", f"Authorization: Bearer {keys[1]['attacker']}")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(server.url)) for _ in range(MOST_WAITING + 12)]
        for number, client in enumerate(clients):
            bomb = body_of({**BOMB, "multipleOf": 99999989 + 2 * number})
            client.send(post(json.dumps(bomb).encode(), "/v1/chat/completions", *headers))
        busy = next(answer for answer in answers_of(clients) if answer.status == 503)
        assert ask(server, keys[1]["honest"], person(1)).status_code == 200
    assert busy.error["code"] == "guide_compiler_busy" and int(busy.headers["retry-after"]) >= 1


def answers_of(clients: list[Client]) -> Iterator[Answer]:
    """In the order in which they come."""
    waiting = {client.socket: client for client in clients}
    while ready := select.select(list(waiting), [], [], PATIENCE_S)[0]:
        for one in ready:
            answer = waiting.pop(one).answer()
            assert answer is not None
            yield answer


def test_no_worker_outlives_the_server(tmp_path: Path) -> None:
    with running_server(str(save_tiny_model(tmp_path)), "--no-console") as server:
        body = {"model": NAME, "prompt": "Hi", "max_tokens": 4, "response_format": {"type": "json_object"}}
        assert server.post("/v1/completions", body).status_code in (200, 400)
        workers = wait_for(
            lambda: [pid for pid in processes_below(server.process.pid) if b"sandbox" in cmdline(pid)],
            "a worker",
            server,
        )
        server.end(signal.SIGKILL)
        wait_until_gone(*workers)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
