"""Adapters behind a gateway: they are models of its own, and streams of one are continued by servers that have the
very same adapter."""

import os
import signal
from pathlib import Path

import pytest

from cumulo.fleet.decide.choosing import Told
from cumulo.fleet.remote.options import PoolMember
from cumulo.fleet.remote.replica import UpstreamReplica
from cumulo.fleet.remote.replicas import NoReplica, PromptHint, Replicas, UnknownModel
from cumulo.fleet.wire import FleetIdentity, FleetNews
from cumulo.gateway.options import GatewayOptions
from cumulo.models.files.load import inspect_model
from tests.gateway.running_gateway import fleet_server, gateway_of, key_file
from tests.models.adapter_files import write_adapter
from tests.serve.running_server import wait_for
from tests.serve.test_streams_survive import CHAT, LONG, Stream, said
from tests.serve.tiny_model import NAME, save_tiny_model

pytestmark = pytest.mark.long


def fleet_of(*adapters: dict[str, str]) -> Replicas:
    """Servers of one model that have told of these adapters, each."""
    members = tuple(PoolMember(f"http://10.0.0.{number}") for number in range(len(adapters)))
    fleet = Replicas(GatewayOptions(members=members))
    for member, loaded in zip(members, adapters, strict=True):
        replica = fleet.replicas[member.url] = UpstreamReplica(member, fleet.options)
        replica.identity = FleetIdentity("1", "chat", "f", "t", 512, 8)
        replica.told, replica.trouble = Told(("chat",), "1", "t"), ""
        replica.take_news(FleetNews(adapters=loaded))
    return fleet


def hint(model: str) -> PromptHint:
    return PromptHint(model, [], 10)


def test_only_a_server_with_the_same_adapter_continues_a_stream_of_it() -> None:
    fleet = fleet_of({"poet": "a"}, {"poet": "b"}, {"poet": "a", "monk": "c"}, {})
    assert set(fleet.models()) == {"chat", "poet", "monk"}
    first, _, third, _ = fleet.replicas.values()
    like = first.likeness("poet")
    assert fleet.choose(hint("poet"), frozenset({first.name}), like).replica is third
    with pytest.raises(NoReplica):
        fleet.choose(hint("poet"), frozenset({first.name, third.name}), like)
    assert len({one.likeness("chat") for one in fleet.replicas.values()}) == 1
    third.take_news(FleetNews())  # nothing new of adapters
    assert fleet.choose(hint("monk")).replica is third
    third.take_news(FleetNews(adapters={}))
    with pytest.raises(UnknownModel):
        fleet.choose(hint("monk"))


@pytest.mark.long
def test_a_stream_of_an_adapter_survives_its_server(tmp_path: Path) -> None:
    model, key = save_tiny_model(tmp_path), key_file(tmp_path)
    poet = write_adapter(tmp_path / "poet", inspect_model(model).spec, strength=2.0)
    lora, ask = ("--lora", f"poet={poet}"), CHAT | LONG | {"temperature": 1, "seed": 3}
    with (
        fleet_server(model, key, *lora) as first,
        fleet_server(model, key, *lora) as second,
        gateway_of([first, second], key) as gateway,
    ):
        models = {one["id"]: one["parent"] for one in gateway.get("/v1/models").json()["data"]}
        assert models == {NAME: None, "poet": NAME}
        whole = Stream(gateway, "/v1/chat/completions", ask | {"model": "poet"})
        plain = Stream(gateway, "/v1/chat/completions", ask)
        whole.join()
        plain.join()
        assert said(whole.events) != said(plain.events)
        stream = Stream(gateway, "/v1/chat/completions", ask | {"model": "poet"})
        assert stream.speaks.wait(60)
        load = {one["url"]: one["in_flight"] for one in gateway.get("/v1/fleet").json()["replicas"]}
        victim = first if load[first.url] else second
        os.kill(victim.process.pid, signal.SIGKILL)
        stream.join()
        assert said(stream.events) == said(whole.events)
        left = second if victim is first else first
        assert left.post("/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 200
        wait_for(lambda: gateway.replica(left.url)["adapters"] == [], "the drop", gateway)
        assert NAME in [one["id"] for one in gateway.get("/v1/models").json()["data"]]
