"""Whoever follows the log holds what the engine holds, however far behind it was."""

import random

from cumulo.fleet.block_log import BlockLog
from cumulo.fleet.wire import HASH_BYTES, unpacked_hashes


def test_followers_know_the_blocks_that_are_held() -> None:
    chance, log = random.Random(0), BlockLog()
    held: set[bytes] = set()
    followers: list[tuple[int | None, set[bytes]]] = [(None, set()) for _ in range(3)]
    for turn in range(6_000):
        came = [chance.randbytes(16) for _ in range(chance.randrange(3))]
        went = chance.sample(sorted(held), min(len(held), chance.randrange(3)))
        log.note(b"".join(came), b"".join(went), restarts=turn // 2_500)
        held = set(came) if turn % 2_500 == 0 else (held - set(went)) | set(came)
        # One is told every change, one seldom, one after so many that it is told everything.
        for place, every in enumerate((1, 37, 2_900)):
            if turn % every == 0:
                version, known = followers[place]
                version, reset, added, removed = log.since(version)
                known = set() if reset else known - set(unpacked_hashes(removed))
                followers[place] = version, known | set(unpacked_hashes(added))
                assert followers[place][1] == {one[:HASH_BYTES] for one in held}


def test_several_engines_are_told_together() -> None:
    log = BlockLog()
    log.become({b"a" * 16, b"b" * 16})
    version, reset, added, _ = log.since(None)
    assert reset and set(unpacked_hashes(added)) == {b"a" * HASH_BYTES, b"b" * HASH_BYTES}
    log.become({b"b" * 16, b"c" * 16})
    _, reset, added, removed = log.since(version)
    assert not reset
    assert (unpacked_hashes(added), unpacked_hashes(removed)) == ([b"c" * HASH_BYTES], [b"a" * HASH_BYTES])
