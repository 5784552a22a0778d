"""Policies decide the same whoever asks them: the simulator, which keeps its free capacity up to date, or a driver,
which builds a snapshot from the jobs it knows; and they change nothing in what they are given."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cumulo.cluster.decide.decisions import Cordon, Decision, untold_reason
from cumulo.cluster.decide.jobs import JobRequest, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.policies import ORDERS, policy_named
from cumulo.cluster.decide.snapshot import Snapshot, TenantQuota, snapshot_of
from cumulo.cluster.simulate.job_speed import TraceJob
from cumulo.cluster.simulate.play import PlayOptions, play
from cumulo.cluster.simulate.synthetic import FailureRates, synthetic_trace, uniform_nodes
from tests.cluster.test_policy_rules import random_job

NAMES = (
    *ORDERS, "las+emptiest", "backfill+topology", "fair+topology", "las+topology", "conservative+topology",
    "priority+topology+cordon", "shortest+cordon", "backfill+emptiest",
)  # fmt: skip


def as_a_driver_has_it(snapshot: Snapshot, draw: random.Random) -> Snapshot:
    """Built from the jobs alone, which a driver knows in another order."""
    running = list(snapshot.running.values())
    draw.shuffle(running)
    return snapshot_of(
        snapshot.now_s, snapshot.nodes, snapshot.waiting, running, list(snapshot.quotas.values())
    )


def asked_both_ways(name: str, draw: random.Random, decided: list[list[Decision]]):
    """A policy that is asked with both snapshots, and must decide the same."""
    of_the_simulator = policy_named(name).decide

    def policy(snapshot: Snapshot) -> list[Decision]:
        found = of_the_simulator(snapshot)
        assert found == policy_named(name).decide(as_a_driver_has_it(snapshot, draw))
        decided.append(found)
        told = {one.job_id for one in found if not isinstance(one, Cordon)}
        if len(snapshot.waiting) > len(told):  # they are told by the decision alone, whatever was before
            assert "None" not in untold_reason(found)
            assert not name.startswith("las")
        return found

    return policy


def random_cluster(draw: random.Random) -> tuple[list[ClusterNode], list[TraceJob], PlayOptions]:
    gpus = draw.choice((2, 4, 8))
    nodes = [
        ClusterNode(f"n{at}", gpus, draw.choice("ab"), draw.choice((8000, 1 << 30)), leaf=f"l{at % 3}")
        for at in range(draw.randint(2, 9))
    ]
    trace = []
    for number in range(draw.randint(5, 30)):
        work = draw.uniform(5, 400)
        asked = replace(
            random_job(draw, f"j{number}", gpus),
            arrival_s=draw.uniform(0, 300),
            predicted_s=draw.choice((None, work, work * draw.uniform(0.3, 3))),
        )
        trace.append(TraceJob(asked, work))
    quotas = tuple(TenantQuota(name, draw.randint(0, 12), draw.randint(0, 12)) for name in "xy")
    options = PlayOptions(
        quotas=quotas if draw.random() < 0.5 else (),
        failures=FailureRates(5e4, repair_s=100.0) if draw.random() < 0.3 else None,
        checkpoint_every_s=60.0,
        seed=draw.randrange(99),
    )
    return nodes, trace, options


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6))
def test_the_simulator_and_the_drivers_get_the_same_decisions(name: str, seed: int) -> None:
    draw = random.Random(seed)
    nodes, trace, options = random_cluster(draw)
    policy, decided = policy_named(name), list[list[Decision]]()
    options = replace(
        options,
        interval_s=20.0 if policy.in_rounds or draw.random() < 0.3 else 0.0,
        always_decide=policy.always_decide,
    )
    play(nodes, trace, asked_both_ways(name, draw, decided), None, options)
    assert decided


@pytest.mark.long
@pytest.mark.parametrize("name", ("conservative", "fair", "priority"))
def test_on_a_long_queue_a_trace_ends_the_same_from_both_snapshots(name: str) -> None:
    nodes, trace = uniform_nodes(16, 8), synthetic_trace(300, 128, 4.0)
    draw = random.Random(1)
    simulated = play(nodes, trace, policy_named(name).decide)
    driven = play(
        nodes, trace, lambda snapshot: policy_named(name).decide(as_a_driver_has_it(snapshot, draw))
    )
    assert simulated.mean_jct_s == driven.mean_jct_s


def test_a_snapshot_cannot_be_changed() -> None:
    job = JobRequest("j")
    snapshot = snapshot_of(0.0, uniform_nodes(1, 4), [job], [])
    with pytest.raises(ValueError, match="read-only"):
        snapshot.free.allocate(job, (TaskPlace("node-0", (0,)),))
    with pytest.raises(TypeError):
        snapshot.running["j"] = None  # type: ignore[index]
    snapshot.free.copy().allocate(job, (TaskPlace("node-0", (0,)),))
    assert snapshot.free.whole.tolist() == [4]
