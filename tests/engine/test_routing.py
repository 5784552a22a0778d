"""Routing decisions: who gets a request, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.engine.decide.routing import ROUTERS, Ask, PrefixAware, ReplicaView, RoundRobin, router
from cumulo.errors import ConfigError, Overloaded

HASHES = [bytes([number]) * 16 for number in range(40)]


def test_round_robin_gives_each_replica_its_turn_and_a_canary_its_share() -> None:
    views = [ReplicaView("a"), ReplicaView("b"), ReplicaView("canary", weight=0.1)]
    policy = RoundRobin()
    names = [policy.route(Ask(10), views).replica for _ in range(210)]
    assert names.count("a") == names.count("b") == 100 and names.count("canary") == 10
    late = [*views, ReplicaView("late")]
    # It starts level with the others, instead of getting everything until it has had as many.
    assert [policy.route(Ask(10), late).replica for _ in range(31)].count("late") == 10


def test_the_replica_that_holds_the_prefix_gets_the_request_and_says_so() -> None:
    views = [
        ReplicaView("a"),
        ReplicaView("b", blocks=frozenset(HASHES[:30])),
        ReplicaView("c", blocks={HASHES[0]}),
    ]
    route = PrefixAware().route(Ask(640, HASHES), views)
    assert route.replica == "b" and route.cached_tokens == 480
    assert "480 of 640" in route.why
    assert route.second is not None and route.second.replica == "c" and route.second.ttft_s > route.ttft_s


def test_a_long_queue_costs_more_than_a_cached_prefix_saves() -> None:
    views = [ReplicaView("idle"), ReplicaView("busy", blocks=frozenset(HASHES), waiting_tokens=50_000)]
    assert PrefixAware().route(Ask(640, HASHES), views).replica == "idle"


def test_a_prefix_on_its_way_counts_as_held() -> None:
    policy, views = PrefixAware(), [ReplicaView(name) for name in "abcd"]
    first = policy.route(Ask(640, HASHES), views).replica
    assert policy.route(Ask(640, HASHES), views).replica == first


def test_a_session_stays_where_it_was_while_that_costs_little() -> None:
    policy = PrefixAware(loyalty_s=0.05)
    views = [ReplicaView("a"), ReplicaView("b")]
    home = policy.route(Ask(100, session="s"), views).replica
    busier = [ReplicaView(name, waiting_tokens=300 if name == home else 0) for name in "ab"]
    assert policy.route(Ask(100, session="s"), busier).replica == home
    much_busier = [ReplicaView(name, waiting_tokens=9000 if name == home else 0) for name in "ab"]
    assert policy.route(Ask(100, session="s"), much_busier).replica != home


def test_without_a_usable_replica_the_reason_is_told() -> None:
    views = [ReplicaView("a", healthy=False), ReplicaView("b", draining=True)]
    with pytest.raises(Overloaded, match="a does not answer, b is draining"):
        router("least-loaded").route(Ask(1), views)
    with pytest.raises(ConfigError, match="round-robin, least-loaded, prefix-aware"):
        router("random")


VIEWS = st.lists(
    st.builds(
        ReplicaView,
        st.sampled_from("abcdefgh"),
        waiting_tokens=st.integers(0, 10**6),
        running=st.integers(0, 400),
        blocks=st.integers(0, 40).map(lambda count: frozenset(HASHES[:count])),
        healthy=st.booleans(),
        draining=st.booleans(),
        weight=st.sampled_from([0.0, 0.1, 1.0]),
    ),
    max_size=8,
    unique_by=lambda view: view.name,
)


@given(st.sampled_from(sorted(ROUTERS)), VIEWS, st.integers(1, 5000), st.sets(st.sampled_from("abcdefgh")))
def test_only_living_replicas_are_chosen_and_failed_ones_only_when_nobody_else_is_left(
    name: str, views: list[ReplicaView], tokens: int, tried: set[str]
) -> None:
    living = {view.name for view in views if view.healthy and not view.draining and view.weight > 0}
    ask = Ask(tokens, HASHES[: tokens // 16], tried=frozenset(tried))
    if not living:
        with pytest.raises(Overloaded):
            router(name).route(ask, views)
        return
    route = router(name).route(ask, views)
    assert route.replica in (living - tried or living)
    assert 0 <= route.cached_tokens < tokens and route.ttft_s > 0 and route.why
