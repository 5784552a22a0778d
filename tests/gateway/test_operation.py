"""What operators do with a gateway: bad input, pools, failing replicas, keys, drain and restart."""

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from cumulo.fleet.wire import PROOF_HEADER, FleetKey
from cumulo.serve.access.keys import new_key
from tests.gateway.running_gateway import KEY, RunningGateway, address, fleet_server, gateway_of, key_file
from tests.ports import reserved_port
from tests.serve.batches.help import begin, chat, end_of, line, results
from tests.serve.running_server import RunningServer, wait_for
from tests.serve.test_streams_survive import CHAT, LONG, Stream
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long
ASK: dict[str, Any] = {"model": NAME, "messages": CHAT["messages"], "max_tokens": 4}


class OtherServer(BaseHTTPRequestHandler):
    """An OpenAI-compatible server of somebody else's: it lists a model, and fails on every request."""

    asked = 0
    breaks = False  # it streams a little, and closes the connection
    state: dict[str, Any] | None = None
    knows_key = True

    def end_headers(self) -> None:
        if (proof := self.headers.get(PROOF_HEADER.decode())) and self.knows_key:
            self.send_header(PROOF_HEADER.decode(), FleetKey(KEY).answer(proof.encode()).decode())
        super().end_headers()

    def do_GET(self) -> None:
        if self.path.startswith("/internal/") and self.state is None:
            self._say(404, {})
        else:
            self._say(200, self.state or {"object": "list", "data": [{"id": NAME}]})

    def do_POST(self) -> None:
        type(self).asked += 1
        self.rfile.read(int(self.headers["content-length"]))
        if self.breaks:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for number in (1, 2):
                event = b'data: {"n": %d}\n\n' % number
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            self.close_connection = True
            return
        self._say(500, {"error": {"message": "out of order"}})

    def _say(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode() + b"\n"
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def other_server(port: int = 0, **more: Any) -> Iterator[tuple[str, type[OtherServer]]]:
    handler = type("Handler", (OtherServer,), more)
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def key(folder: Path) -> str:
    return key_file(folder)


@pytest.fixture(scope="module")
def servers(folder: Path, key: str) -> Iterator[tuple[RunningServer, RunningServer]]:
    """The second one calls its model `other`."""
    model = save_tiny_model(folder)
    with fleet_server(model, key) as first, fleet_server(model, key, "--name", "other") as second:
        yield first, second


@contextlib.contextmanager
def gateway_of_urls(*arguments: str) -> Iterator[RunningGateway]:
    gateway = RunningGateway(*arguments)
    try:
        yield gateway
    finally:
        gateway.end()


def refused(*arguments: str) -> str:
    """What a gateway says that does not start."""
    with pytest.raises(AssertionError) as error:
        RunningGateway(*arguments)
    return str(error.value)


@pytest.mark.long
def test_a_fleet_that_cannot_work_is_refused_with_what_would(
    servers: tuple[RunningServer, RunningServer], key: str, tmp_path: Path
) -> None:
    first, second = servers
    wrong = tmp_path / "wrong.key"
    wrong.write_text("another-key-of-good-length")
    assert "start gateway and servers with the same --fleet-key-file" in refused(
        first.url, "--fleet-key-file", str(wrong)
    )
    assert f"--pool other={second.url}" in refused(first.url, second.url, "--fleet-key-file", key)
    assert "serves 'other', not 'chat'" in refused("--pool", f"chat={second.url}", "--fleet-key-file", key)
    assert "given twice" in refused(first.url, first.url)
    assert "MODEL=URL" in refused("--pool", first.url)
    identity = {"version": "9.9", "model": NAME, "fingerprint": "f", "tokenizer": "t",
                "max_context": 99, "max_running": 9}  # fmt: skip
    with other_server(state={"identity": identity}) as (url, _):
        assert "runs Cumulo 9.9 and this gateway" in refused(url, "--fleet-key-file", key)
    with other_server(state={"identity": identity}, knows_key=False) as (url, _):
        assert "does not know the fleet's key" in refused(url, "--fleet-key-file", key)


def test_a_gateway_may_be_started_before_its_servers(key: str) -> None:
    port = reserved_port()
    gateway = RunningGateway(f"http://127.0.0.1:{port}", "--fleet-key-file", key, "--wait-for-replica", "0")
    try:
        assert gateway.status("/ready") == 503
        assert f"http://127.0.0.1:{port}: does not answer: no connection" in gateway.log
        early = gateway.post("/v1/chat/completions", ASK)
        assert early.status_code == 503 and early.headers["retry-after"]
        with other_server(port):
            wait_for(lambda: gateway.status("/ready") == 200, "its server", gateway)
            assert [one["id"] for one in gateway.get("/v1/models").json()["data"]] == [NAME]
    finally:
        gateway.end()


def test_pools_replicas_and_a_failing_one(servers: tuple[RunningServer, RunningServer], key: str) -> None:
    first, second = servers
    with gateway_of([], key, "--pool", f"{NAME}={first.url}", "--pool", f"other={second.url}") as gateway:
        assert {one["id"] for one in gateway.get("/v1/models").json()["data"]} == {NAME, "other"}
        for name in (NAME, "other"):
            assert gateway.post("/v1/chat/completions", {**ASK, "model": name}).json()["model"] == name
        for url, reason in ((second.url, "already"), ("http://127.0.0.1:9", "does not answer")):
            answer = gateway.operate("POST", "", url=url)
            assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
        open_door = httpx.post(f"{gateway.url}/v1/fleet/replicas", json={"url": second.url}, timeout=60)
        assert open_door.status_code == 401
        with other_server() as (url, handler):
            assert gateway.operate("POST", "", url=url).json()["kind"] == "openai"
            begun_s = time.monotonic()
            for _ in range(12):  # each is answered by the good one, and soon the bad one is left alone
                assert gateway.post("/v1/chat/completions", ASK).status_code == 200
            # After three failures it is tried once after a second, two more, four more, and so on.
            tried_again = math.log2(1 + time.monotonic() - begun_s)
            assert 1 <= handler.asked <= 3 + tried_again
            assert gateway.operate("DELETE", f"/{url.removeprefix('http://')}").status_code == 200
        drained = gateway.operate("POST", f"/{address(second)}/drain").json()
        assert drained["state"] == "draining"
        made = gateway.post("/v1/responses", {"model": NAME, "input": "Hi", "max_output_tokens": 4}).json()[
            "id"
        ]
        assert gateway.get(f"/v1/responses/{made}").json()["id"] == made
    with gateway_of([], key, "--pool", f"other={second.url}", "--pool", f"{NAME}={first.url}") as gateway:
        # Another gateway does not know where it was made, and finds it.
        assert gateway.get(f"/v1/responses/{made}").json()["id"] == made
        assert gateway.get("/v1/responses/resp_none").status_code == 404


def test_a_gateway_is_no_replica_of_itself_nor_of_one_behind_it(folder: Path, key: str) -> None:
    """Requests would go round for ever."""
    with other_server() as (url, _):
        first = RunningGateway(url, "--fleet-key-file", key)
        second = RunningGateway(first.url, "--fleet-key-file", key)
        try:
            itself = first.operate("POST", "", url=first.url)
            assert itself.status_code == 400 and "is this gateway itself" in itself.text
            assert first.operate("DELETE", f"/{address_of(url)}").status_code == 200
            assert first.operate("POST", "", url=second.url).status_code == 201  # a gateway is a server, too
            found = second.post("/v1/chat/completions", ASK)
            assert found.status_code == 508 and found.json()["error"]["code"] == "loop"
        finally:
            second.end()
            first.end()


def address_of(url: str) -> str:
    return url.removeprefix("http://")


def test_another_servers_broken_stream_ends_with_a_clear_error() -> None:
    with other_server(breaks=True) as (url, _):
        gateway = RunningGateway(url)
        try:
            stream = Stream(gateway, "/v1/chat/completions", CHAT)
            stream.join()
            assert [event for event in stream.events if "n" in event] == [{"n": 1}, {"n": 2}]
            message = stream.events[-1]["error"]["message"]
            assert "closed the connection" in message and "fleet key" in message
        finally:
            gateway.end()


def test_uploads_pass_through_without_filling_the_memory(
    servers: tuple[RunningServer, RunningServer], key: str
) -> None:
    content, found = b'{"custom_id": "a"}\n' * (1 << 20), list[bytes]()

    def most_mib() -> float:
        status = Path(f"/proc/{gateway.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def upload() -> None:
        form = {"file": ("batch.jsonl", content)}
        made = httpx.post(f"{gateway.url}/v1/files", files=form, data={"purpose": "batch"}, timeout=300)
        assert made.is_success, made.text
        path = f"/v1/files/{made.json()['id']}"
        found.append(gateway.get(f"{path}/content").content)
        assert httpx.delete(gateway.url + path).is_success

    with gateway_of(servers[:1], key) as gateway:
        before_mib = most_mib()
        clients = [threading.Thread(target=upload) for _ in range(4)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert found == [content] * 4
        assert most_mib() - before_mib < 2 * len(content) / (1 << 20)  # of 8 times that went through it


def test_files_go_to_cumulo_servers_where_there_are_any(
    servers: tuple[RunningServer, RunningServer], key: str, tmp_path: Path
) -> None:
    callers = [new_key(tmp_path / "keys.json", name) for name in "abcdef"]
    with other_server() as (url, other):
        keys = ("--fleet-key-file", key, "--api-keys", str(tmp_path / "keys.json"))
        with gateway_of_urls(servers[0].url, url, *keys) as gateway:
            for caller in callers:
                made = httpx.post(
                    f"{gateway.url}/v1/files", files={"file": ("f.jsonl", b"{}")}, data={"purpose": "batch"},
                    headers={"X-Api-Key": caller}, timeout=300,
                )  # fmt: skip
                assert made.is_success, made.text
        assert other.asked == 0


def test_a_batch_of_a_caller_that_the_gateway_let_in_is_run(
    servers: tuple[RunningServer, RunningServer], key: str, tmp_path: Path
) -> None:
    caller = new_key(tmp_path / "keys.json", "ann")
    with gateway_of(servers[:1], key, "--api-keys", str(tmp_path / "keys.json")) as gateway:
        client = gateway.client(caller)
        ended = end_of(client, begin(client, [line("one", chat("Hi"))]), gateway)
        assert ended.status == "completed" and list(results(client, ended.output_file_id)) == ["one"]
        assert "let_in" not in client.batches.retrieve(ended.id).model_dump()


def test_callers_of_a_gateway_share_the_steps_of_servers_without_keys(
    servers: tuple[RunningServer, RunningServer], key: str, tmp_path: Path
) -> None:
    callers = {name: new_key(tmp_path / "keys.json", name) for name in ("cat", "dog")}
    with gateway_of(servers[:1], key, "--api-keys", str(tmp_path / "keys.json")) as gateway:
        for name, caller in callers.items():
            assert gateway.client(caller).chat.completions.create(**ASK).choices

            def tokens(name: str = name) -> float:
                return servers[0].sample("cumulo:tenant_tokens_total", tenant=name)

            wait_for(tokens, f"the tokens of {name}", servers[0])


def test_strange_requests_are_refused_and_forge_no_line_of_the_log() -> None:
    with other_server() as (url, _), gateway_of_urls(url) as gateway:
        shown = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
                 "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
        found = gateway.get("/v1/realtime", headers=shown)
        assert found.status_code == 501 and "no WebSockets" in found.json()["error"]["message"]
        assert gateway.status("/v1/x%0a2026-01-01 00:00:00,000 gateway ERROR forged%1b[2J") is not None
        wait_for(lambda: "forged" in gateway.log, "the line", gateway)
        assert "\\x0a2026-01-01" in gateway.log and "\x1b" not in gateway.log
        assert gateway.status("/health") == 200


def test_keys_are_checked_at_the_gateway(
    servers: tuple[RunningServer, RunningServer], key: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    ann = new_key(keys, "ann", requests_per_minute=3)
    with gateway_of(servers[:1], key, "--api-keys", str(keys)) as gateway:
        assert gateway.post("/v1/chat/completions", ASK).status_code == 401
        shown = {"Authorization": f"Bearer {ann}"}
        answer = gateway.post("/v1/chat/completions", ASK, headers=shown)
        assert answer.status_code == 200
        story = gateway.get(f"/v1/requests/{answer.json()['id']}/explain", headers=shown).json()
        assert (
            story["data"][0]["replica"] == servers[0].url
        )  # the replica's own story, under the caller's name
        codes = [gateway.post("/v1/chat/completions", ASK, headers=shown).status_code for _ in range(4)]
        assert codes == [200, 200, 429, 429]


def test_a_gateway_is_replaced_without_a_failed_request(
    servers: tuple[RunningServer, RunningServer], key: str
) -> None:
    first, _ = servers
    with gateway_of([first], key) as old:
        stream = Stream(old, "/v1/chat/completions", CHAT | LONG | {"temperature": 0, "max_tokens": 300})
        assert stream.speaks.wait(60)
        port = old.url.rpartition(":")[2]
        with gateway_of([first], key, "--port", port) as new:
            old.process.send_signal(signal.SIGTERM)
            stream.join()
            assert stream.events[-1] == "data: [DONE]" and len(stream.events) > 200
            assert old.process.wait(60) == 0
            assert new.post("/v1/chat/completions", ASK).status_code == 200


def test_streams_that_outlast_the_drain_are_told_why_they_end(
    servers: tuple[RunningServer, RunningServer], key: str
) -> None:
    with gateway_of(servers[:1], key, "--drain-timeout", "0") as gateway:
        engine = servers[0].engine_pid()
        ask = CHAT | LONG | {"temperature": 0, "max_tokens": 400}
        stream = Stream(
            gateway, "/v1/chat/completions", ask, on_speech=lambda: os.kill(engine, signal.SIGSTOP)
        )
        try:
            assert stream.speaks.wait(60)
            gateway.process.send_signal(signal.SIGTERM)
            stream.join()
            assert gateway.process.wait(60) == 0
        finally:
            os.kill(engine, signal.SIGCONT)
    if stream.events[-1] != "data: [DONE]":  # the engine was stopped in time
        assert "when the gateway was told to end" in stream.events[-1]["error"]["message"]
