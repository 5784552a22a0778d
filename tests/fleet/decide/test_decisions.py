"""The gateway's decisions, without a socket: breakers, weights, membership, prompts by their text."""

from collections import Counter

import pytest

from cumulo.engine.decide.routing import Ask, NoReplica, ReplicaView
from cumulo.fleet.decide.choosing import Breaker, Chooser, Told, refusal, stray
from cumulo.fleet.decide.prompt_text import TEXT_BLOCK, peek


def test_a_breaker_opens_after_failures_in_a_row_and_lets_one_try() -> None:
    breaker = Breaker(most_failures=3, pause_s=1.0)
    breaker.on_failure(0.0, "no answer")
    breaker.on_success()
    for _ in range(2):
        breaker.on_failure(1.0, "no answer")
        assert not breaker.refuses(1.0)
    breaker.on_failure(1.0, "no answer")
    assert "no answer" in breaker.refuses(1.5)
    assert not breaker.refuses(2.0)  # half open
    breaker.on_sent(2.0)
    assert breaker.refuses(2.0)  # one at a time
    breaker.on_no_outcome()
    assert not breaker.refuses(2.0)
    breaker.on_sent(2.0)
    breaker.on_failure(2.1, "still none")
    assert breaker.refuses(4.0) and not breaker.refuses(4.2)  # the pause has doubled
    breaker.on_sent(4.2)
    breaker.on_success()
    assert breaker.state(4.2) == "closed"


@pytest.mark.parametrize("policy", ["prefix-aware", "least-loaded", "round-robin"])
def test_a_canary_gets_its_share_exactly(policy: str) -> None:
    replicas = [ReplicaView("a"), ReplicaView("b"), ReplicaView("canary")]
    weights = {"a": 1.0, "b": 1.0, "canary": 0.5}
    chooser = Chooser(policy)
    given = Counter(chooser.choose(Ask(100), replicas, weights).replica for _ in range(100))
    assert given["canary"] == 20  # 0.5 of 2.5


def test_a_replica_without_weight_is_the_last_resort() -> None:
    chooser = Chooser("least-loaded")
    weights = {"a": 1.0, "spare": 0.0}
    both = [ReplicaView("a"), ReplicaView("spare")]
    assert {chooser.choose(Ask(9), both, weights).replica for _ in range(5)} == {"a"}
    assert chooser.choose(Ask(9), [ReplicaView("a", refuses="drains"), both[1]], weights).replica == "spare"
    with pytest.raises(NoReplica, match="a drains, spare was tried"):
        tried = Ask(9, tried=frozenset({"spare"}))
        chooser.choose(tried, [ReplicaView("a", refuses="drains"), both[1]], weights)


def test_servers_that_do_not_belong_together_are_refused_with_what_would_work() -> None:
    told = Told(("chat",), "1.0", "t")
    assert refusal("u", "chat", told, "1.0", [("v", told)]) == ""
    assert "install the same version" in refusal("u", None, told, "2.0", [])
    assert "--pool chat=u" in refusal("u", "other", told, "1.0", [])
    other = Told(("chat",), "1.0", "another")
    assert "tokenizers differ" in refusal("u", None, told, "1.0", [("v", other)])
    assert "--pool chat=u --pool small=v" in stray("v", Told(("small",)), [("u", told)])


def test_prompts_that_begin_alike_have_hashes_that_begin_alike() -> None:
    first, again = (
        peek(b'{"prompt": "' + b"x" * (8 * TEXT_BLOCK) + end + b'"}') for end in (b"first", b"other")
    )
    assert len(first.chain("")) == 8 and first.chain("") == again.chain("")
    assert not set(first.chain("")) & set(again.chain("another caller"))
    half = peek(b'{"prompt": "' + b"x" * (4 * TEXT_BLOCK) + b'"}')
    assert half.chain("") == first.chain("")[: len(half.chain(""))]
    prefixed = peek(b'{"tools": [1], "prompt": "' + b"x" * (8 * TEXT_BLOCK) + b'"}')
    assert not set(prefixed.chain("")) & set(first.chain(""))


def test_a_body_that_cannot_be_read_is_left_to_the_server() -> None:
    for body in (b"", b"[1]", b'{"model": 3}', b"\xff"):
        assert peek(body).model is None
