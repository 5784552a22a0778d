"""Streams whose replica is killed, stopped or drained in mid-answer go on at another with the very tokens they
would have had: none lost, none doubled, none other. Real processes, real signals."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.running_gateway import RunningGateway, address, fleet_server, gateway_of, key_file
from tests.serve.running_server import RunningServer, wait_for
from tests.serve.test_streams_survive import CHAT, KINDS, LONG, Stream, said
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long
ALL: dict[str, tuple[str, dict[str, Any]]] = KINDS | {
    "several samples": ("/v1/chat/completions", CHAT | LONG | {"n": 3, "seed": 4, "temperature": 1}),
    "several prompts": (
        "/v1/completions",
        {"model": NAME, "prompt": ["Once", "Twice"], "stream": True, "seed": 2, "temperature": 1} | LONG,
    ),
    "echoed": (
        "/v1/completions",
        {"model": NAME, "prompt": "Once upon", "stream": True, "temperature": 0, "echo": True, "logprobs": 2}
        | LONG,
    ),
}


def by_choice(events: list[Any]) -> dict[int, str]:
    """The text of each choice; they are told in any order."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            new = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + new
    return texts


class Fleet:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._model, self.key, self._stack = save_tiny_model(folder), key_file(folder), stack
        self.servers = [self.serve() for _ in range(2)]
        self.gateway: RunningGateway = stack.enter_context(
            gateway_of(self.servers, self.key, "--hang-timeout", "5", "--stall-timeout", "5")
        )
        self.undisturbed = self.told(self.streams())

    def serve(self, *options: str) -> RunningServer:
        return self._stack.enter_context(fleet_server(self._model, self.key, *options))

    def streams(self, through: RunningGateway | None = None) -> dict[str, Stream]:
        return {name: Stream(through or self.gateway, *asked) for name, asked in ALL.items()}

    def speaking(self, through: RunningGateway | None = None) -> dict[str, Stream]:
        """Streams of all kinds, when the first ones speak: they do not for long."""
        streams = self.streams(through)
        for name in ("seeded", "logprobs", "guided"):
            assert streams[name].speaks.wait(60)
        return streams

    @staticmethod
    def told(streams: dict[str, Stream]) -> dict[str, Any]:
        for stream in streams.values():
            stream.join()
        return {name: [by_choice(stream.events), said(stream.events)[1:]] if name.startswith("several")
                else said(stream.events) for name, stream in streams.items()}  # fmt: skip

    def busiest(self) -> RunningServer:
        """The server with most streams."""
        load = {one["url"]: one["in_flight"] for one in self.gateway.get("/v1/fleet").json()["replicas"]}
        return max(self.servers, key=lambda server: load.get(server.url, -1))

    def moved_from(self, server: RunningServer, streams: dict[str, Stream]) -> list[dict[str, Any]]:
        """The stories of those chats that began there and went on elsewhere."""
        chats = {
            name for stream in streams.values() if "chatcmpl" in (name := str(stream.events[0].get("id")))
        }
        recent = self.gateway.read("/v1/fleet")["recent"]
        moved = [one["id"] for one in recent if one["moves"] and one["id"] in chats]
        stories = [self.gateway.read(f"/v1/requests/{name}/explain") for name in moved]
        return [one for one in stories if one["gateway"]["replicas"][0] == server.url]

    def check(self, streams: dict[str, Stream]) -> None:
        told = self.told(streams)
        for name in ALL:
            assert told[name] == self.undisturbed[name], name
        for event_stream in streams.values():
            ids = {event["id"] for event in event_stream.events if isinstance(event, dict) and "id" in event}
            assert len(ids) <= 1, ids
        numbers = [
            event["sequence_number"] for event in streams["responses"].events if isinstance(event, dict)
        ]
        assert numbers == list(range(len(numbers)))
        assert self.gateway.sample("cumulo:gateway_failed_requests_total") == 0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("fleet"), stack)


@pytest.mark.long
def test_a_drained_replicas_streams_move(fleet: Fleet) -> None:
    streams = fleet.speaking()
    victim = fleet.busiest()
    answer = fleet.gateway.operate("POST", f"/{address(victim)}/drain?move=true")
    assert answer.json()["state"] == "draining"
    fleet.check(streams)
    assert fleet.gateway.replica(victim.url)["in_flight"] == 0
    fleet.gateway.operate("POST", f"/{address(victim)}/undrain")
    # A server that was silent for seconds, on a busy machine, is unavailable until it is heard of again.
    wait_for(lambda: fleet.gateway.replica(victim.url)["state"] == "ready", "its return", fleet.gateway)


@pytest.mark.long
def test_streams_through_two_gateways_move_behind_the_second(fleet: Fleet) -> None:
    with gateway_of([fleet.gateway], fleet.key) as outer:
        streams = fleet.speaking(outer)
        victim = fleet.busiest()
        fleet.gateway.operate("POST", f"/{address(victim)}/drain?move=true")
        fleet.check(streams)
        assert outer.sample("cumulo:gateway_failed_requests_total") == 0
    fleet.gateway.operate("POST", f"/{address(victim)}/undrain")
    wait_for(lambda: fleet.gateway.replica(victim.url)["state"] == "ready", "its return", fleet.gateway)


@pytest.mark.long
def test_a_client_that_hangs_up_while_its_server_stands_still_leaves_nothing_behind(fleet: Fleet) -> None:
    def busy() -> list[dict[str, Any]]:
        found = fleet.gateway.get("/v1/fleet").json()["replicas"]
        return [one for one in found if one["in_flight"] or one["running"] or one["waiting"]]

    with httpx.stream(
        "POST", fleet.gateway.url + ALL["seeded"][0], json=ALL["seeded"][1], timeout=60
    ) as stream:
        next(stream.iter_bytes())
        victim = fleet.busiest()
        os.kill(victim.process.pid, signal.SIGSTOP)
    try:  # the client has hung up, and the gateway has not noticed yet that the server stands still
        wait_for(lambda: fleet.gateway.replica(victim.url)["in_flight"] == 0, "its end", fleet.gateway)
        wait_for(lambda: fleet.gateway.replica(victim.url)["state"] != "ready", "the hang", fleet.gateway)
    finally:
        os.kill(victim.process.pid, signal.SIGCONT)
    wait_for(lambda: fleet.gateway.replica(victim.url)["state"] == "ready", "its return", fleet.gateway)
    wait_for(lambda: not busy(), "an idle fleet", fleet.gateway)


@pytest.mark.parametrize("part", ["server", pytest.param("engine", marks=pytest.mark.thorough)])
def test_a_stopped_replica_changes_no_stream(fleet: Fleet, part: str) -> None:
    streams = fleet.speaking()
    victim = fleet.busiest()
    stopped = victim.process.pid if part == "server" else victim.engine_pid()
    os.kill(stopped, signal.SIGSTOP)
    try:
        fleet.check(streams)
        # What comes now is not sent where everything stands still.
        assert fleet.gateway.post(
            "/v1/completions", {"model": NAME, "prompt": "x", "max_tokens": 2}
        ).is_success
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: fleet.gateway.replica(victim.url)["state"] == "ready", "its return", fleet.gateway)


def test_a_server_that_is_told_to_leave_changes_no_stream(fleet: Fleet) -> None:
    """Its engine stands still until the drain has ended and all of its streams are told to end in the middle."""
    leaving = fleet.serve("--drain-timeout", "0")
    assert fleet.gateway.operate("POST", "", url=leaving.url).status_code == 201
    engine, others = leaving.engine_pid(), [server for server in fleet.servers if server is not leaving]
    for other in others:
        fleet.gateway.operate("POST", f"/{address(other)}/drain")
    streams = fleet.streams()
    assert streams["logprobs"].speaks.wait(60)
    os.kill(engine, signal.SIGSTOP)
    try:
        for other in others:
            fleet.gateway.operate("POST", f"/{address(other)}/undrain")
        leaving.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "did not finish in time" in leaving.log, "the end of the drain")
    finally:
        os.kill(engine, signal.SIGCONT)
    fleet.check(streams)
    assert leaving.process.wait(60) == 0
    assert fleet.gateway.operate("DELETE", f"/{address(leaving)}").status_code == 200


def test_a_killed_replica_changes_no_stream_and_another_takes_its_place(fleet: Fleet) -> None:
    for _ in range(10):
        streams = fleet.speaking()
        victim = fleet.busiest()
        os.kill(victim.process.pid, signal.SIGKILL)
        fleet.check(streams)
        stories = fleet.moved_from(victim, streams)
        fleet.servers.remove(victim)
        fleet.servers.append(fleet.serve())
        assert fleet.gateway.operate("POST", "", url=fleet.servers[-1].url).status_code == 201
        assert fleet.gateway.operate("DELETE", f"/{address(victim)}").status_code == 200
        replicas = {one["url"] for one in fleet.gateway.get("/v1/fleet").json()["replicas"]}
        assert replicas == {server.url for server in fleet.servers}
        if stories:  # else all had ended before the kill: this process had to wait for its turn
            break
    assert {"routed", "lost"} <= {event["kind"] for event in stories[0]["data"][0]["events"]}
    assert fleet.gateway.sample("cumulo:gateway_continued_streams_total") > 0
