"""What one tenant's requests do to the first tokens of another that asks one short question after the other."""

import random
from collections.abc import Callable
from functools import cache

import pytest

from tests.engine.closed_loops import Asked, Client, play, sampling, tokens

ATTACKS: dict[str, Callable[[random.Random], Asked]] = {
    "eight answers at a time": lambda chance: [([1] * 31, sampling(32, samples=8))],
    "all places": lambda chance: [([1] * 31, sampling(64, samples=128))] * 2,
    "more answers than places": lambda chance: [([1] * 31, sampling(64, samples=64))] * 8,
    "as many requests as places": lambda chance: [(tokens(chance, 8), sampling(400)) for _ in range(256)],
    "four long prompts": lambda chance: [(tokens(chance, 3500), sampling(1)) for _ in range(4)],
    "one longer prompt after the other": lambda chance: [(tokens(chance, 200), sampling(1))],
    "thirty short prompts": lambda chance: [(tokens(chance, 40), sampling(2)) for _ in range(30)],
    "sixteen texts to embed": lambda chance: [(tokens(chance, 400), sampling(1)) for _ in range(16)],
    "all of it": lambda chance: [
        (
            tokens(chance, chance.choice([5, 40, 300])),
            sampling(chance.choice([1, 8, 40]), chance.choice([1, 4, 20])),
        )
        for _ in range(chance.choice([1, 3, 8]))
    ],
}
_ATTACKED_S = 5.0  # from then on


def honest(prompt: int = 23) -> Client:
    return Client("honest", lambda chance: [(tokens(chance, prompt), sampling(2))], only_first_token=True)


@cache
def undisturbed_s(prompt: int = 23) -> float:
    client = honest(prompt)
    play([client], 10)
    return client.ttft_s(0.99)


@pytest.mark.long
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_at_most_doubles_the_ttft_of_another_tenant(attack: str) -> None:
    client = honest()
    play([client, Client("attacker", ATTACKS[attack], starts_s=_ATTACKED_S)], 35)
    assert len(client.stories) > 150
    assert client.ttft_s(0.99, since_s=_ATTACKED_S) <= 2 * undisturbed_s()


@pytest.mark.parametrize("attack", ["four long prompts", "all places", "eight answers at a time"])
def test_one_who_comes_for_the_first_time_waits_no_longer(attack: str) -> None:
    """The attacker was alone until then, with long steps and every place."""
    client = honest()
    client.starts_s, client.only_first_token = 20.0, True
    play([client, Client("attacker", ATTACKS[attack])], 20.5)
    first = client.stories[0].story
    assert first.ttft_s is not None and first.ttft_s <= 2 * undisturbed_s()


def test_a_longer_prompt_of_one_who_asks_little_is_not_drowned_by_many() -> None:
    client = honest(prompt=100)
    play([client, Client("attacker", ATTACKS["four long prompts"], starts_s=_ATTACKED_S)], 35)
    assert client.ttft_s(0.99, since_s=_ATTACKED_S) <= 2 * undisturbed_s(100)


def test_a_tenant_with_much_to_do_gets_on_beside_one_that_asks_all_the_time() -> None:
    client, other = honest(), Client("other", lambda chance: [(tokens(chance, 400), sampling(1))])
    play([client, other], 60)
    assert len(other.stories) >= 4  # alone it would be 29
