"""Routing decisions: which replica gets a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumulo.engine.decide.routing import ROUTERS, Ask, PrefixAware, ReplicaView, RoundRobin, router
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


def test_a_replica_that_was_given_too_much_is_passed_over_whatever_it_holds() -> None:
    views = [ReplicaView("hot", blocks=frozenset(HASHES)), *(ReplicaView(name) for name in "abc")]
    policy = PrefixAware(given_tokens={"hot": 10_000.0})
    assert policy.route(Ask(640, HASHES), views).replica != "hot"


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
