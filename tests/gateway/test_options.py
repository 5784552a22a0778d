"""What a gateway is told: addresses as people paste them, and what cannot be, with what would work."""

from pathlib import Path

import pytest

from cumulo.errors import CumuloError
from cumulo.fleet.remote.options import PoolMember
from cumulo.gateway.options import GatewayOptions, read_members
from cumulo.serve.http.listening import bind


@pytest.mark.parametrize(
    "text", ["127.0.0.1:8000", "http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"]
)
def test_an_address_may_be_the_base_url_of_a_client(text: str) -> None:
    assert PoolMember(text).url == "http://127.0.0.1:8000"


@pytest.mark.parametrize("name", ["hang_timeout_s", "stall_timeout_s", "connect_timeout_s", "idle_timeout_s"])
def test_a_timeout_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(CumuloError, match=f"{name} must be more than 0 seconds, got 0"):
        GatewayOptions(members=(PoolMember("127.0.0.1:8000"),), **{name: 0})
    assert GatewayOptions(members=(PoolMember("127.0.0.1:8000"),), drain_timeout_s=0).drain_timeout_s == 0


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(CumuloError, match=f"{name} must be 1 or more, got -1; omit it"):
        GatewayOptions(members=(PoolMember("127.0.0.1:8000"),), **{name: -1})


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expected `object`, got `null`"),
        ("replicas: {a: b}", "Expected `array`, got `object` - at `\\$.replicas`"),
        ("replicas: []\nretries: 3", "unknown field `retries`"),
        ("replicas: [http://a]", "Expected `object`, got `str`"),
        (
            "replicas: [{url: http://a}, {model: b}]",
            "missing required field `url` - at `\\$.replicas\\[1\\]`",
        ),
        ("replicas: [{url: 5}]", "Expected `str`, got `int` - at `\\$.replicas\\[0\\].url`"),
        ("replicas: [{url: http://a, wieght: 2}]", "unknown field `wieght`"),
        ("replicas: [{url: http://a, weight: '1'}]", "Expected `float`, got `str`"),
        ("replicas: [{url: http://a, weight: true}]", "Expected `float`, got `bool`"),
        ("replicas: [{url: http://a, model: 7}]", "got `int` - at `\\$.replicas\\[0\\].model`"),
        ("replicas: [", "expected"),
        ("[" * 3000, "no list of replicas"),
    ],
)
def test_a_file_of_replicas_is_refused_by_what_is_wrong_in_it(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(CumuloError, match=words):
        read_members(path)


def test_a_file_of_replicas_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("replicas: [{url: http://a}, {url: b:9/v1, model: chat, weight: 0.05}]")
    assert read_members(path) == (PoolMember("http://a"), PoolMember("http://b:9", "chat", 0.05))


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(CumuloError, match=r"cannot listen on 127.0.0.1:99999 \(port must be 0-65535"):
        bind("127.0.0.1", 99999)
