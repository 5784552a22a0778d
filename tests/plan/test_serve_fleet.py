"""A simulated fleet: the real scheduler on every replica, and a router before them."""

from dataclasses import replace

import pytest

from cumulo.engine.simulate.run import Arrival
from cumulo.plan.serve.fleet import play_fleet, play_split, shared_cache_share
from cumulo.plan.serve.goodput import play_goodput
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.report import report
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.catalog import shipped
from cumulo.spec.slo import Slo

CATALOG = shipped()
CLUSTER = CATALOG.cluster(1, "h200")


def conversations(count: int, turns: int, gap_s: float = 0.05) -> Traffic:
    """Conversations whose prompts repeat everything before, one piece of 512 tokens a turn."""
    arrivals = [
        Arrival((turn * count + number) * gap_s, 512 * (turn + 1) + 40, 20,
                tuple((1000 * number + piece, 512) for piece in range(turn + 1)))
        for turn in range(turns) for number in range(count)
    ]  # fmt: skip
    return Traffic(tuple(arrivals))


@pytest.fixture(scope="module")
def replica() -> Replica:
    traffic = conversations(30, 8)
    return Replica(CATALOG.model("llama-3.1-8b"), CLUSTER.node, CLUSTER.fabric).with_context_for(
        traffic.arrivals
    )


def test_one_replica_of_a_fleet_is_the_simulated_engine(replica: Replica) -> None:
    traffic = conversations(30, 8)
    run, cost = replica.serve(traffic.arrivals)
    alone = report(run, replica.memory().kv_blocks, cost.spent(run))
    fleet = play_fleet(replica, 1, "prefix-aware", traffic)
    assert (fleet.ttft_s, fleet.itl_s, fleet.cached_share) == (alone.ttft_s, alone.itl_s, alone.cached_share)
    assert fleet.simulated_s == alone.simulated_s and fleet.load_over_mean == 1


def test_the_time_outside_the_engine_is_part_of_ttft_and_of_nothing_else(replica: Replica) -> None:
    traffic = conversations(4, 2)
    inside, seen = (
        play_fleet(replace(replica, front_door_s=door_s), 2, "prefix-aware", traffic)
        for door_s in (0.0, 0.003)
    )
    assert inside.ttft_s is not None and seen.ttft_s is not None
    assert seen.ttft_s.p50 == pytest.approx(inside.ttft_s.p50 + 0.003)
    assert (seen.itl_s, seen.simulated_s, seen.cached_share) == (
        inside.itl_s, inside.simulated_s, inside.cached_share,
    )  # fmt: skip


def test_right_drafts_make_answers_faster_in_every_kind_of_fleet(replica: Replica) -> None:
    """One long answer: what it takes is nearly the whole run."""
    traffic = Traffic((Arrival(0.0, 200, 600), Arrival(0.001, 200, 2)))
    drafting, repeating = replace(replica, acceptance=0.8, speculate="head"), replace(replica, acceptance=0.9)
    for play in (
        lambda one: play_fleet(one, 1, "prefix-aware", traffic),
        lambda one: play_split(one, 1, 1, "prefix-aware", traffic),
    ):
        assert play(replica).simulated_s > 1.5 * play(drafting).simulated_s
        assert play(replica).simulated_s > 1.5 * play(repeating).simulated_s
    slo = Slo(ttft_s=1.0, e2e_s=None, itl_s=0.05)
    with_promises = [play_goodput(one, traffic, slo, promise=True) for one in (replica, drafting)]
    assert all(one.kept == one.admitted == 2 for one in with_promises)


@pytest.mark.long
def test_prefix_aware_routing_reaches_nearly_the_reuse_of_one_shared_cache(replica: Replica) -> None:
    traffic = conversations(31, 8, gap_s=0.01)
    found = {
        name: play_fleet(replica, 4, name, traffic)
        for name in ("round-robin", "least-loaded", "prefix-aware")
    }
    assert all(one.finished == one.requests == 248 for one in found.values())
    aware, blind = found["prefix-aware"], found["least-loaded"]
    assert aware.reuse > 0.95 and aware.load_over_mean < 1.3
    assert aware.cached_share > blind.cached_share
    assert aware.ttft_s is not None and blind.ttft_s is not None and aware.ttft_s.mean < blind.ttft_s.mean


def test_a_shared_cache_finds_what_its_size_allows() -> None:
    traffic = conversations(2, 3)
    whole = sum(512 * turn * 2 for turn in range(3)) / sum(one.prompt_tokens for one in traffic.arrivals)
    assert shared_cache_share(traffic, 10_000, 16) == pytest.approx(whole)
    assert shared_cache_share(traffic, 40, 16) < whole / 2
