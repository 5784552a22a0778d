"""The block pool under random use: nothing leaks, nothing is freed twice, the cache finds what it should."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.core.block_pool import BlockPool, chain_hashes, root_hash
from tests import thorough
from tests.engine.invariants import pool_problems


@settings(max_examples=thorough.examples(100), deadline=None)
@given(seed=st.integers(0, 10**6), blocks=st.integers(1, 40))
def test_the_books_balance_after_every_operation(seed: int, blocks: int):
    rng = random.Random(seed)
    pool = BlockPool(blocks, 4)
    pool.news = {}
    told: set[bytes] = set()  # by the news, now and then: what a router knows of the cache
    owners: list[list[int]] = []
    known: list[bytes] = []
    for step in range(200):
        action = rng.random()
        if action < 0.4 and pool.free_count:
            owners.append([pool.allocate() for _ in range(rng.randint(1, pool.free_count))])
        elif action < 0.55 and owners:
            table = rng.choice(owners)
            pool.share(table)
            owners.append(table[:])
        elif action < 0.7 and owners:
            block_hash = rng.randbytes(16)
            pool.register_many([rng.choice(rng.choice(owners))], [block_hash])
            known.append(block_hash)
        elif action < 0.8 and known:
            hits = pool.cached_prefix([rng.choice(known)])
            pool.share(hits)
            if hits:
                owners.append(hits)
        elif owners:
            pool.release(owners.pop(rng.randrange(len(owners))))
        assert pool_problems(pool, owners) == []
        if step % 7 == 0:
            told -= {block_hash for block_hash, is_here in pool.news.items() if not is_here}
            told |= {block_hash for block_hash, is_here in pool.news.items() if is_here}
            pool.news = {}
            assert told == pool.block_of.keys()
    for table in owners:
        pool.release(table)
    assert pool.free_count == blocks


def test_freeing_twice_is_noticed():
    pool = BlockPool(2, 4)
    table = [pool.allocate() for _ in range(1)]
    pool.release(table)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.release(table)


def test_a_freed_block_can_be_found_again_until_it_is_reused():
    pool = BlockPool(2, 4)
    table = [pool.allocate() for _ in range(2)]
    pool.register_many(table[:1], [b"a" * 16])
    pool.release(table)
    assert pool.cached_prefix([b"a" * 16]) == [table[0]]
    pool.allocate()  # the block without a hash goes first
    assert pool.cached_prefix([b"a" * 16]) == [table[0]]
    pool.allocate()
    assert pool.cached_prefix([b"a" * 16]) == []
    assert pool.evictions == 1


def test_hash_chains_depend_on_tokens_order_salt_and_everything_before():
    one, two = array("i", [1, 2]), array("i", [3, 4])
    root = root_hash("")
    hashes = {
        *chain_hashes(root, one + two, 2),
        *chain_hashes(root, two, 2),
        *chain_hashes(root_hash("salt"), one, 2),
        *chain_hashes(root, array("i", [2, 1]), 2),
    }
    assert len(hashes) == 5
    first, second = chain_hashes(root, one + two, 2)
    assert [second] == chain_hashes(first, two, 2)
