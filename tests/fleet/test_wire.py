"""Gateway and server prove to each other that they know the fleet's key, and neither tells it."""

import time

import pytest

from cumulo.fleet.wire import FleetKey, NoProof

KEY = "a key of a fleet"
REQUEST = ("POST", b"/v1/completions?a=b", b'{"id":"1"}')


def test_a_proof_tells_no_key_and_is_answered_by_who_knows_it() -> None:
    gateway, server = FleetKey(KEY), FleetKey(KEY)
    proof = gateway.prove(*REQUEST)
    server.check(proof, *REQUEST)
    answer = server.answer(proof)
    assert KEY.encode() not in proof + answer
    assert gateway.is_answered(proof, answer.decode())
    assert not gateway.is_answered(gateway.prove(*REQUEST), answer.decode())
    # What a gateway proves is no server's proof.
    assert not gateway.is_answered(proof, proof.rpartition(b" ")[2].decode())
    assert not gateway.is_answered(proof, FleetKey("another key").answer(proof).decode())


@pytest.mark.parametrize(
    "other",
    [
        ("GET", *REQUEST[1:]),
        ("POST", b"/v1/completions?a=c", REQUEST[2]),
        ("POST", REQUEST[1], b'{"id":"2"}'),
        ("POST", REQUEST[1] + b'{"id":"1"}', b""),
    ],
)
def test_a_proof_is_of_one_request(other: tuple[str, bytes, bytes]) -> None:
    with pytest.raises(NoProof, match="not this server's"):
        FleetKey(KEY).check(FleetKey(KEY).prove(*REQUEST), *other)


@pytest.mark.parametrize("proof", [b"", b" ", b"1 2", b"x y z", b"\xff " * 3])
def test_what_is_no_proof_is_refused(proof: bytes) -> None:
    with pytest.raises(NoProof):
        FleetKey(KEY).check(proof, *REQUEST)


def test_a_proof_holds_once_and_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, server, now_s = FleetKey(KEY), FleetKey(KEY), time.time()
    proof = gateway.prove(*REQUEST)
    server.check(proof, *REQUEST)
    with pytest.raises(NoProof, match="received before"):
        server.check(proof, *REQUEST)
    late = gateway.prove(*REQUEST)
    monkeypatch.setattr(time, "time", lambda: now_s + 2 * FleetKey.LONGEST_S)
    with pytest.raises(NoProof, match="clocks"):
        server.check(late, *REQUEST)
    with pytest.raises(NoProof, match="clocks"):
        server.check(proof, *REQUEST)
