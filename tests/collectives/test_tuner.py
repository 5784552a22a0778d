"""The tuner's choices follow from latency and bytes, and say so; pictures show every message."""

import pytest

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.check import check_collective
from cumulo.collectives.decide.measured import collective_profile
from cumulo.collectives.decide.tuner import MachineCosts, ProtocolCosts, crossovers, tune
from cumulo.collectives.draw import collective_svg
from cumulo.errors import ConfigError
from tests import thorough

US = 1e-6
NODE = MachineCosts(8, 1, (ProtocolCosts("simple", 0.0, 1 * US, 5 * US, 100e9, 25e9),))


def test_short_messages_take_few_hops_and_long_ones_few_bytes() -> None:
    short, long = tune("all_reduce", 256, 8, NODE)[0], tune("all_reduce", 1 << 30, 8, NODE)[0]
    assert short.algorithm == "one-shot"
    assert long.bytes_s == pytest.approx(2 * 7 / 8 * (1 << 30) / 100e9)
    assert short.latency_s < long.latency_s
    assert "hops" in short.why and "bound by latency" in short.why


def test_crossovers_are_where_the_next_choice_becomes_the_faster() -> None:
    found = crossovers("all_reduce", 8, NODE)
    assert len(found) >= 2
    for one in found[1:]:
        assert one.before is not None
        smaller = tune("all_reduce", one.size_bytes // 2, 8, NODE)[0]
        assert (smaller.algorithm, smaller.protocol) == (one.before.algorithm, one.before.protocol)


@pytest.mark.long
def test_a_ring_beats_a_tree_when_bytes_count_and_loses_when_hops_do() -> None:
    def seconds(size: int) -> dict[str, float]:
        choices = tune("all_reduce", size, 512 if thorough.chosen else 256, NODE)
        return {one.algorithm: one.seconds for one in sorted(choices, key=lambda one: -one.seconds)}

    few, many = seconds(1 << 12), seconds(1 << 34)
    assert few["tree"] < few["ring"]
    assert many["ring"] < many["tree"]


def test_a_measured_profile_decides_by_its_own_times() -> None:
    rows = [
        {"collective": "all_reduce", "algorithm": name, "ranks": 2, "bytes": size, "pieces": 1, "seconds": s}
        for name, size, s in [
            ("ring", 1024, 9.0),
            ("ring", 4096, 10.0),
            ("tree", 1024, 4.0),
            ("tree", 4096, 40.0),
        ]
    ]
    profile = collective_profile({"rows": rows})
    assert profile.ours("all_reduce", 1024, 2)[0] == "tree"
    assert profile.ours("all_reduce", 4096, 2) == ("ring", pytest.approx(10.0))
    assert profile.fastest("all_reduce", 4096, 2) == "ring"
    gloo = {**rows[0], "algorithm": "gloo", "seconds": 1.0}
    assert collective_profile({"rows": [*rows, gloo]}).fastest("all_reduce", 1024, 2) is None
    assert profile.fastest("all_reduce", 1024, 3, "auto") == "auto"
    with pytest.raises(ConfigError, match="no all_reduce of 3 ranks"):
        profile.ours("all_reduce", 1024, 3)


def test_a_picture_has_a_line_for_every_message() -> None:
    schedule = make_schedule("all_reduce", "tree", CollectiveShape(5, 50, pieces=2))
    assert (
        collective_svg(schedule).count('<line class="reduce"')
        + collective_svg(schedule).count('<line class="copy"')
        == check_collective(schedule).messages
    )
