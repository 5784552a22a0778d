"""Routing decisions: which replica gets a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.engine.decide.routing import (
    ROUTERS,
    Ask,
    LeastLoaded,
    NoReplica,
    PrefixAware,
    ReplicaView,
    RoundRobin,
    expected,
    router,
)
from cumulo.errors import ConfigError

HASHES = [bytes([number]) * 16 for number in range(40)]


def test_round_robin_gives_each_replica_its_turn() -> None:
    policy, views = RoundRobin(), [ReplicaView(name) for name in "abc"]
    assert "".join(policy.route(Ask(10), views).replica for _ in range(7)) == "abcabca"


def test_the_replica_that_holds_the_prefix_gets_the_request() -> None:
    held = ReplicaView("b", blocks=frozenset(HASHES[:30]))
    route = PrefixAware().route(
        Ask(640, HASHES), [ReplicaView("a"), held, ReplicaView("c", blocks={HASHES[0]})]
    )
    assert route.replica == "b" and route.cached_tokens == 480


def test_a_long_queue_costs_more_than_a_cached_prefix_saves() -> None:
    views = [ReplicaView("idle"), ReplicaView("busy", blocks=frozenset(HASHES), waiting_tokens=50_000)]
    assert PrefixAware().route(Ask(640, HASHES), views).replica == "idle"


def test_a_prefix_on_its_way_counts_as_held() -> None:
    policy, views = PrefixAware(), [ReplicaView(name) for name in "abcd"]
    first = policy.route(Ask(640, HASHES), views).replica
    assert policy.route(Ask(640, HASHES), views).replica == first


def test_new_prefixes_spread_although_measured_steps_differ_a_little() -> None:
    policy = PrefixAware()
    views = [
        ReplicaView(name, step_s=step_s) for name, step_s in (("a", 0.0100), ("b", 0.0098), ("c", 0.0103))
    ]
    given = [policy.route(Ask(640, [bytes([number]) * 16] * 40), views).replica for number in range(30)]
    assert {given.count(name) for name in "abc"} == {10}


def test_a_replica_that_was_given_too_much_is_passed_over_whatever_it_holds() -> None:
    views = [ReplicaView("hot", blocks=frozenset(HASHES)), *(ReplicaView(name) for name in "abc")]
    policy = PrefixAware(given_tokens={"hot": 50_000.0} | dict.fromkeys("abc", 0.0))
    assert policy.route(Ask(640, HASHES), views).replica != "hot"


def test_a_route_says_why_and_what_the_second_choice_would_have_cost() -> None:
    views = [
        ReplicaView("a", blocks=frozenset(HASHES[:30])),
        ReplicaView("b"),
        ReplicaView("c", waiting_tokens=900),
    ]
    route = PrefixAware().route(Ask(640, HASHES), views)
    assert "480 of 640 prompt tokens are cached there" in route.why
    assert route.second == expected(Ask(640, HASHES), views[1])
    assert LeastLoaded().route(Ask(640), views[1:]).second == expected(Ask(640), views[2])
    assert RoundRobin().route(Ask(640), views[:1]).second is None


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_replicas_that_drain_or_failed_this_request_get_none_and_silent_ones_only_in_need(name: str) -> None:
    busy = ReplicaView("busy", waiting_tokens=10**6, running=400)
    views = [ReplicaView("drains", refuses="is draining"), ReplicaView("silent", silent=True), busy]
    policy = router(name)
    assert {policy.route(Ask(10), views).replica for _ in range(5)} == {"busy"}
    assert policy.route(Ask(10, tried=frozenset({"busy"})), views).replica == "silent"
    with pytest.raises(NoReplica, match="drains is draining, silent was tried, busy was tried"):
        policy.route(Ask(10, tried=frozenset({"busy", "silent"})), views)


def test_a_session_stays_at_its_replica_while_that_costs_little() -> None:
    policy, ask = PrefixAware(), Ask(10, session="ann")
    views = [ReplicaView(name) for name in "ab"]
    home = policy.route(ask, views).replica
    busier = [ReplicaView(name, waiting_tokens=20 * (name == home)) for name in "ab"]
    assert policy.route(Ask(10), busier).replica != home
    assert policy.route(ask, busier).replica == home
    assert "session" in policy.route(ask, busier).why
    much_busier = [ReplicaView(name, waiting_tokens=20_000 * (name == home)) for name in "ab"]
    assert policy.route(ask, much_busier).replica != home


def test_another_tenants_queue_counts_no_more_than_ones_own_because_engines_are_fair() -> None:
    flooded = ReplicaView("flooded", waiting_tokens=90_000, queues={(0, "bob"): 90_000})
    own = ReplicaView("own", waiting_tokens=4_000, queues={(0, "ann"): 4_000})
    assert PrefixAware().route(Ask(500, tenant="ann"), [flooded, own]).replica == "flooded"
    assert PrefixAware().route(Ask(500, tenant="bob"), [flooded, own]).replica == "own"


def test_less_important_requests_are_not_waited_for() -> None:
    batch = ReplicaView("batch", waiting_tokens=90_000, queues={(9, "ann"): 90_000})
    first = ReplicaView("first", waiting_tokens=2_000, queues={(-1, "bob"): 2_000})
    assert expected(Ask(100, tenant="ann"), batch).ttft_s < expected(Ask(100, tenant="ann"), first).ttft_s
    assert expected(Ask(100, tenant="ann", priority=9), batch).ttft_s > 9


def test_a_replica_that_joins_does_not_get_everything() -> None:
    policy, views = PrefixAware(), [ReplicaView(name) for name in "ab"]
    for number in range(100):
        policy.route(Ask(64, HASHES[number % 10 * 4 :][:4]), views)
    held = frozenset(HASHES)
    joined = [ReplicaView("a", blocks=held), ReplicaView("b", blocks=held), ReplicaView("new")]
    placed = [policy.route(Ask(64, HASHES[:4]), joined).replica for _ in range(10)]
    assert placed.count("new") <= 2


def test_what_a_restarted_replica_was_promised_is_forgotten() -> None:
    policy, views = PrefixAware(), [ReplicaView(name) for name in "ab"]
    first = policy.route(Ask(640, HASHES), views)
    policy.forget(first.replica)
    assert policy.route(Ask(640, HASHES), views).cached_tokens == 0


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="round-robin, least-loaded, prefix-aware"):
        router("random")


VIEWS = st.lists(
    st.builds(
        ReplicaView,
        st.sampled_from("abcdefgh"),
        waiting_tokens=st.integers(0, 10**6),
        running=st.integers(0, 400),
        blocks=st.integers(0, 40).map(lambda count: frozenset(HASHES[:count])),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda view: view.name,
)


@given(st.sampled_from(sorted(ROUTERS)), VIEWS, st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_every_request_gets_a_replica_and_never_its_whole_prompt_from_a_cache(
    name: str, views: list[ReplicaView], prompts: list[int]
) -> None:
    policy = router(name)
    for tokens in prompts:
        route = policy.route(Ask(tokens, HASHES[: tokens // 16]), views)
        assert route.replica in {view.name for view in views}
        assert 0 <= route.cached_tokens < tokens and route.ttft_s > 0
