"""`cumulo serve --replicas`: requests are routed; killed, hung, drained and restarted replicas change no answer.
Real processes, real signals."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from cumulo.errors import CumuloError
from cumulo.serve.access.keys import new_key
from cumulo.serve.options import ServeOptions
from tests.serve.running_server import PATIENCE_S, RunningServer, running_server, wait_for
from tests.serve.test_streams_survive import KINDS, Stream, said
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long
SHORT: dict[str, Any] = {
    "model": NAME,
    "prompt": "Once upon a time the cat",
    "max_tokens": 12,
    "temperature": 0,
}
LONG: dict[str, Any] = SHORT | {"max_tokens": 150, "ignore_eos": True, "stream": True}


class FleetServer:
    """A server with two replicas, its keys, and what its streams say when nothing happens to them."""

    def __init__(self, server: RunningServer, key: str, operator: str) -> None:
        self.server, self.key, self.operator = server, key, operator
        server.operator_key = operator
        wait_for(self.all_ready, "all replicas", server)
        self.undisturbed = {
            name: said(stream.events) for name, stream in self.streams().items() if not stream.join()
        }

    def streams(self, on_speech: Callable[[], None] = lambda: None) -> dict[str, Stream]:
        return {name: Stream(self.server, *asked, self.key, on_speech) for name, asked in KINDS.items()}

    @contextmanager
    def halted(self) -> Iterator[tuple[dict[str, Stream], dict[str, Any]]]:
        """Streams in mid-answer, and the replica that has most of them. All engines stand still meanwhile: however
        fast they are, nothing ends before the fault."""
        wait_for(self.all_ready, "all replicas", self.server)
        pids = {one["name"]: one["pid"] for one in self.replicas().values()}
        while True:
            spoke = Event()

            def halt(spoke: Event = spoke) -> None:
                if not spoke.is_set():
                    send(signal.SIGSTOP, pids.values())
                    spoke.set()

            streams = self.streams(halt)
            assert spoke.wait(PATIENCE_S)
            if (hurt := self.busiest())["in_flight"] >= 2:
                break
            send(signal.SIGCONT, pids.values())  # they were through already
            for stream in streams.values():
                stream.join()
        try:
            yield streams, hurt
        finally:
            send(signal.SIGCONT, (pid for name, pid in pids.items() if name != hurt["name"]))

    def fleet(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask("GET", "/v1/fleet").json()
        return answer

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.fleet()["replicas"]}

    def all_ready(self) -> bool:
        return all(one["state"] == "ready" for one in self.replicas().values())

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key or self.operator}"}
        return httpx.request(method, self.server.url + path, json=body, headers=headers, timeout=PATIENCE_S)

    def busiest(self) -> dict[str, Any]:
        return max(self.replicas().values(), key=lambda one: one["in_flight"])

    def story(self, stream: Stream) -> dict[str, Any]:
        told = self.ask("GET", f"/v1/requests/{stream.events[0]['id']}/explain", key=self.key).json()["data"][
            0
        ]
        return dict(told)


def is_faster_again(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether a request went where the one before it did, as the faster choice."""
    routed = second["events"][0]
    assert routed["kind"] == "routed"
    other = routed["second"]
    return first["replicas"] == second["replicas"] and other and other["ttft_ms"] > routed["ttft_ms"]


def send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetServer]:
    folder = tmp_path_factory.mktemp("fleet")
    model: Path = save_tiny_model(folder)
    keys = folder / "keys.json"
    key, operator = new_key(keys, "ann"), new_key(keys, "ops", may_operate=True)
    # Long enough for a busy machine to hurt an engine that `halted` has stopped before it counts as stalled.
    options = ("--replicas", "2", "--kv-memory-gib", "0.02", "--stall-timeout", "8", "--drain-timeout", "1")
    with running_server(str(model), "--no-console", "--api-keys", str(keys), *options) as running:
        yield FleetServer(running, key, operator)


def test_a_prompt_goes_where_its_beginning_is_cached_and_its_story_says_so(fleet: FleetServer) -> None:
    def asked(prompt: str) -> dict[str, Any]:
        answer = fleet.ask("POST", "/v1/completions", SHORT | {"prompt": prompt}, fleet.key).json()
        told = fleet.ask("GET", f"/v1/requests/{answer['id']}/explain", key=fleet.key).json()
        return dict(told["data"][0])

    # Where a prompt goes follows from measured steps too, so the other replica may be cheaper in a slow moment.
    beginnings = (f"{number} the dog saw that the cat was there and the mat was " * 4 for number in range(40))
    pairs = ((asked(beginning + "a"), asked(beginning + "b")) for beginning in beginnings)
    second = next(second for first, second in pairs if is_faster_again(first, second))
    routed = second["events"][0]
    assert routed["cached_tokens"] == second["tokens"]["cached"] > 0
    assert routed["second"]["replica"] != routed["replica"]
    assert "prompt tokens are cached there" in routed["words"] and "the second choice" in routed["words"]
    decision = fleet.fleet()["decisions"][0]
    assert decision["request_id"] == second["id"] and decision["why"] == routed["why"]
    held = fleet.replicas()[routed["replica"]]["blocks"]
    assert held["cached"] >= routed["cached_tokens"] // 16
    sample = fleet.server.sample
    for name in ("r0", "r1"):
        assert sample("cumulo:replica_up", replica=name) == 1
        assert sample("cumulo:replica_requests_total", replica=name) == fleet.replicas()[name]["requests"]
    assert sample("cumulo:replica_cached_tokens_total") >= routed["cached_tokens"]
    assert sample("cumulo:route_ttft_predicted_over_measured_count") >= 2


def test_requests_with_the_same_prompt_cache_key_stay_at_one_replica(fleet: FleetServer) -> None:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
        "prompt_cache_key": "s",
    }
    for _ in range(2):
        answer = fleet.ask("POST", "/v1/chat/completions", body, fleet.key)
    events = fleet.ask("GET", f"/v1/requests/{answer.json()['id']}/explain", key=fleet.key).json()["data"][0][
        "events"
    ]
    assert "its session's replica" in events[0]["why"]


def test_a_killed_replica_changes_no_stream_and_the_server_stays_ready(fleet: FleetServer) -> None:
    with fleet.halted() as (streams, hurt):
        os.kill(hurt["pid"], signal.SIGKILL)
        assert fleet.server.status("/ready") == 200
    check(fleet, streams, hurt["name"], "was killed by SIGKILL")
    assert fleet.server.sample("cumulo:engine_restarts") >= 1
    assert fleet.server.sample("cumulo:replica_restarts", replica=hurt["name"]) >= 1
    assert fleet.server.sample("cumulo:requests_moved_total") >= 2


def test_a_replica_that_hangs_changes_no_stream(fleet: FleetServer) -> None:
    moved = fleet.server.sample("cumulo:requests_moved_total")
    with fleet.halted() as (streams, hurt):
        pass  # the others go on
    check(fleet, streams, hurt["name"], "finished no step for 8 s")
    assert fleet.server.sample("cumulo:requests_moved_total") >= moved + 2


def check(fleet: FleetServer, streams: dict[str, Stream], hurt: str, because: str) -> None:
    for name, stream in streams.items():
        stream.join()
        assert said(stream.events) == fleet.undisturbed[name], name
        # Those of other APIs have no id of their own, and may be all that was moved: the metric counts them.
        if "id" in stream.events[0] and len((story := fleet.story(stream))["replicas"]) == 2:
            assert story["replicas"][0] == hurt and because in story["summary"]
            times_ms = {one["kind"]: one["at_ms"] for one in story["events"]}
            if "taken_over" in times_ms:  # after its first token, which the replica before has drawn
                assert 0 < story["times_ms"]["first_token"] < times_ms["moved"]
            assert story["tokens"]["cached"] <= story["tokens"]["prompt"]
    wait_for(fleet.all_ready, "all replicas", fleet.server)
    assert because in fleet.replicas()[hurt]["last_failure"]


def test_a_drained_replica_gets_nothing_and_gives_its_streams_away(fleet: FleetServer) -> None:
    with fleet.halted() as (streams, hurt):
        drained = hurt["name"]
        answer = fleet.ask("POST", f"/v1/fleet/replicas/{drained}/drain?move=true")
        assert answer.status_code == 200 and answer.json()["state"] == "draining"
        assert answer.json()["in_flight"] == 0
        send(signal.SIGCONT, [hurt["pid"]])
    for name, stream in streams.items():
        stream.join()
        assert said(stream.events) == fleet.undisturbed[name], name
    requests = fleet.replicas()[drained]["requests"]
    for _ in range(4):
        assert fleet.ask("POST", "/v1/completions", SHORT, fleet.key).status_code == 200
    assert fleet.replicas()[drained]["requests"] == requests
    last = fleet.ask("POST", f"/v1/fleet/replicas/{'r1' if drained == 'r0' else 'r0'}/drain")
    assert last.status_code == 409 and f"{drained} is draining" in last.json()["error"]["message"]
    assert fleet.ask("POST", f"/v1/fleet/replicas/{drained}/undrain").json()["state"] == "ready"


@pytest.mark.long
def test_a_rolling_restart_fails_no_request(fleet: FleetServer) -> None:
    before, stop = {one["pid"] for one in fleet.replicas().values()}, Event()

    def ask_again_and_again(number: int) -> set[str]:
        texts = set()
        while not stop.is_set():
            stream = Stream(
                fleet.server, "/v1/completions", LONG | {"seed": number, "temperature": 1}, fleet.key
            )
            stream.join()
            texts.add("".join(event["choices"][0]["text"] for event in stream.events[:-1]))
            assert stream.events[-1] == "data: [DONE]"
        return texts

    with ThreadPoolExecutor() as threads:
        clients = [threads.submit(ask_again_and_again, number) for number in range(2)]
        assert fleet.ask("POST", "/v1/fleet/restart").status_code == 202
        refused = fleet.ask("POST", "/v1/fleet/replicas/r1/restart")
        assert refused.status_code == 409 and "is being restarted" in refused.json()["error"]["message"]
        wait_for(
            lambda: fleet.all_ready() and not before & {one["pid"] for one in fleet.replicas().values()},
            "new engines",
            fleet.server,
        )
        stop.set()
        assert [len(client.result()) for client in clients] == [1] * 2  # each got one answer, again and again


def test_replicas_are_added_and_removed(fleet: FleetServer) -> None:
    added = fleet.ask("POST", "/v1/fleet/replicas")
    assert added.status_code == 202 and added.json()["state"] == "starting"
    wait_for(fleet.all_ready, "a third replica", fleet.server)
    assert len(fleet.replicas()) == 3
    assert fleet.ask("DELETE", "/v1/fleet/replicas/r0").json()["state"] == "removing"
    wait_for(lambda: "r0" not in fleet.replicas(), "the end of r0", fleet.server)
    assert fleet.ask("POST", "/v1/completions", SHORT, fleet.key).status_code == 200


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(CumuloError, match="replicas must be 1 or more, got 0"):
        ServeOptions(replicas=0)
    with pytest.raises(
        CumuloError, match="no router 'random'; use one of round-robin, least-loaded, prefix-aware"
    ):
        ServeOptions(replicas=2, router="random")


def test_what_cannot_be_is_refused_with_the_reason(fleet: FleetServer) -> None:
    unknown = fleet.ask("POST", "/v1/fleet/replicas/r9/drain")
    assert unknown.status_code == 404 and "there are r" in unknown.json()["error"]["message"]
    for method, path in (("GET", "/v1/fleet"), ("POST", "/v1/fleet/restart"), ("POST", "/v1/fleet/replicas")):
        refused = fleet.ask(method, path, key=fleet.key)
        assert refused.status_code == 403 and "--operator" in refused.json()["error"]["message"]
        assert fleet.ask(method, path, key="wrong").status_code == 401
