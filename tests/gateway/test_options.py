"""What a gateway is told: addresses as people paste them, and what cannot be, with what would work."""

import pytest

from cumulo.errors import CumuloError
from cumulo.gateway.options import GatewayOptions, PoolMember
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


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(CumuloError, match=r"cannot listen on 127.0.0.1:99999 \(port must be 0-65535"):
        bind("127.0.0.1", 99999)
