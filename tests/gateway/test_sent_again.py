"""A gateway may send a request again to a server that still computes it, because it was slow to answer or has been
drained and taken back: the two are two requests, and each has its own tokens."""

import os
import signal
from pathlib import Path
from threading import Thread

import httpx
import pytest

from cumulo.fleet.decide.sealed_stream import SealedStream
from cumulo.fleet.wire import (
    STATE_PATH,
    FleetAsk,
    read_news,
    written,
)
from tests.gateway.running_gateway import fleet_server, key_file, proven
from tests.serve.running_server import RunningServer
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long
BODY = {"model": NAME, "prompt": "Once", "stream": True, "max_tokens": 60, "ignore_eos": True, "seed": 3}


class Sent(Thread):
    """A request with a gateway's id, and what came of it."""

    def __init__(self, server: RunningServer, id: str) -> None:
        super().__init__(daemon=True)
        self.stream, self.events, self._url = SealedStream(), b"", server.url + "/v1/completions"
        self._headers = proven("POST", "/v1/completions", written(FleetAsk(id, 1, 5)))
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=BODY, headers=self._headers, timeout=60) as response:
            for piece in response.iter_raw():
                self.events += self.stream.feed(piece)

    @property
    def text(self) -> str:
        self.join(60)
        assert self.stream.state == "ended", self.events
        events = [one for one in self.events.split(b"\n\n") if one.startswith(b"data: {")]
        choices = [httpx.Response(200, content=one[6:]).json()["choices"] for one in events]
        return "".join(choice["text"] for several in choices for choice in several)


def wait_until_waiting(server: RunningServer, count: int) -> None:
    with httpx.stream("GET", server.url + STATE_PATH, headers=proven("GET", STATE_PATH), timeout=60) as state:
        for line in state.iter_lines():
            if read_news(line).waiting == count:
                return


def test_a_request_that_comes_twice_is_answered_twice(tmp_path: Path) -> None:
    with fleet_server(save_tiny_model(tmp_path), key_file(tmp_path)) as server:
        right = Sent(server, "0" * 24)
        assert len(right.text) > 60
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            first = Sent(server, "1" * 24)
            wait_until_waiting(server, 1)
            second = Sent(server, "1" * 24)
            wait_until_waiting(server, 2)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert first.text == second.text == right.text
        # Stories of both are kept under the one id that the client knows.
        told = server.get(f"/v1/requests/cmpl-{'1' * 24}/explain").json()["data"]
        assert len({one["id"] for one in told}) == 2
