"""A network that is slower than the host: bytes leave at its rate, whoever wakes up late."""

import pytest

from cumulo.collectives.play import sockets
from cumulo.collectives.play.sockets import LinkShaper


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(sockets.time, "monotonic", lambda: now[0])
    return now


def _send(
    shaper: LinkShaper, size: int, clock: list[float], late_s: float = 0.0, connection: int = 1
) -> float:
    """When a message of `size` bytes has left, by somebody who always wakes up this late."""
    left, at_s, goes_on = size, clock[0], False
    while left:
        count, at_s = shaper.grant(left, goes_on, connection)
        clock[0], left, goes_on = max(clock[0], at_s + late_s), left - count, True
    return at_s


def test_a_message_takes_its_bytes_over_the_rate_though_the_sender_wakes_up_late(clock: list[float]) -> None:
    assert _send(LinkShaper(1e6), 1_000_000, clock, late_s=1.5e-3) == pytest.approx(101.0)


def test_an_idle_card_saves_nothing_up(clock: list[float]) -> None:
    shaper = LinkShaper(1e6)
    _send(shaper, 1000, clock)
    clock[0] += 10.0
    assert _send(shaper, 500_000, clock) == pytest.approx(clock[0] - 0, abs=1e-9) == pytest.approx(110.501)


def test_connections_share_a_card_but_not_a_rate_of_their_own(clock: list[float]) -> None:
    for alone, expected in ((False, 100.2), (True, 100.1)):
        clock[0] = 100.0
        shaper = LinkShaper(1e6, each_connection=alone)
        begun = {1: 100_000, 2: 100_000}
        ends: dict[int, float] = {}
        goes_on = dict.fromkeys(begun, False)
        while any(begun.values()):
            for connection, left in begun.items():
                if left:
                    count, ends[connection] = shaper.grant(left, goes_on[connection], connection)
                    begun[connection], goes_on[connection] = left - count, True
        assert max(ends.values()) == pytest.approx(expected)
