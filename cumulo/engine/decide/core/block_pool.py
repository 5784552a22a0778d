"""BlockPool: who owns which KV block, and which blocks still hold a prefix worth keeping. Owned by the scheduler.

A block is free, or held by one or more sequences (its reference count). A full block may carry the hash of
all tokens up to its end; it keeps that hash when freed, so the prefix cache needs no storage of its own: the
free blocks are the cache, reused least-recently-freed first.

With data-parallel attention blocks lie on several ranks, each of which has an equal run of them. All blocks of a
sequence are on one rank, since one rank computes its attention.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

BlockHash = bytes
_EMPTY = blake2b(digest_size=16, person=b"cumulo-kv-chain")


@lru_cache(1024)
def root_hash(salt: str) -> BlockHash:
    """Where a tenant's hash chains begin: other salts never share blocks, so no timing leaks between them."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cumulo-kv").digest()


def chain_hashes(parent: BlockHash, tokens: "array[int]", block_size: int) -> list[BlockHash]:
    """Of full blocks that follow one another, each hash is of its tokens and of everything before them."""
    text, size, found = tokens.tobytes(), block_size * tokens.itemsize, []
    for start in range(0, len(text), size):
        state = _EMPTY.copy()  # cheaper than a constructor with options
        state.update(parent + text[start : start + size])
        parent = state.digest()
        found.append(parent)
    return found


class BlockPool:
    def __init__(self, blocks: int, block_size: int, *, prefix_cache: bool = True, ranks: int = 1) -> None:
        self.blocks, self.block_size, self.prefix_cache = blocks, block_size, prefix_cache
        self.ranks, self._rank_blocks = ranks, blocks // ranks
        self.references = [0] * blocks
        self.hash_of: list[BlockHash | None] = [None] * blocks
        self.block_of: dict[BlockHash, int] = {}
        # By rank, oldest first: the head is evicted next. Blocks without a hash are put back at the head.
        self._free: list[OrderedDict[int, None]] = [
            OrderedDict.fromkeys(range(first, first + self._rank_blocks))
            for first in range(0, self._rank_blocks * ranks, self._rank_blocks)
        ]
        self.evictions = 0
        # Hashes that came (True) or went (False) since the reader emptied it; None: nobody reads it.
        self.news: dict[BlockHash, bool] | None = None
        # Blocks that were evicted, with what they hold until they are written; None: nobody keeps that elsewhere.
        self.evicted: list[tuple[BlockHash, int]] | None = None

    @property
    def free_count(self) -> int:
        return sum(map(len, self._free))

    @property
    def used_count(self) -> int:
        return self.blocks - self.free_count

    def free_on(self, rank: int) -> int:
        return len(self._free[rank])

    def rank_of(self, block: int) -> int:
        return block // self._rank_blocks

    @property
    def emptiest_rank(self) -> int:
        return max(range(self.ranks), key=self.free_on)

    @property
    def cached_count(self) -> int:
        """Blocks, free or in use, that a new request with the same prefix could share."""
        return len(self.block_of)

    def allocate(self, rank: int = 0) -> int:
        """Take the rank's least recently freed block; the caller checked that there is one."""
        block, _ = self._free[rank].popitem(last=False)
        block_hash = self.hash_of[block]
        if block_hash is not None:
            del self.block_of[block_hash]
            self.hash_of[block] = None
            self.evictions += 1
            if self.evicted is not None:
                self.evicted.append((block_hash, block))
            if self.news is not None:
                self.news[block_hash] = False
        self.references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for blocks that may be in use or free-but-cached."""
        for block in blocks:
            if self.references[block] == 0:
                del self._free[block // self._rank_blocks][block]
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less. Freed from the last block backwards, so that prefixes outlive their tails."""
        references, size = self.references, self._rank_blocks
        for block in reversed(blocks):
            remaining = references[block] - 1
            if remaining < 0:
                raise RuntimeError(f"KV block {block} was freed twice")
            references[block] = remaining
            if remaining == 0:
                free = self._free[block // size]
                free[block] = None
                if self.hash_of[block] is None:
                    free.move_to_end(block, last=False)

    def cached_prefix(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix of a hash chain, as far as they are on one rank; not yet owned by
        the caller."""
        found: list[int] = []
        if self.prefix_cache:
            for block_hash in hashes:
                block = self.block_of.get(block_hash)
                if block is None or (
                    found and self.ranks > 1 and self.rank_of(block) != self.rank_of(found[0])
                ):
                    break
                found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds: sharing them uses up that many free ones."""
        return sum(1 for block in blocks if self.references[block] == 0)

    def register_many(self, blocks: Iterable[int], hashes: Iterable[BlockHash]) -> None:
        """Held blocks are full and computed: later requests may share them. The first copy of a prefix wins."""
        if self.prefix_cache:
            hash_of, block_of, news = self.hash_of, self.block_of, self.news
            for block, block_hash in zip(blocks, hashes, strict=True):
                if hash_of[block] is None and block_hash not in block_of:
                    hash_of[block] = block_hash
                    block_of[block_hash] = block
                    if news is not None:
                        news[block_hash] = True

    def clear_cache(self) -> int:
        """Forget every cached prefix; returns how many blocks had one."""
        count = len(self.block_of)
        for block in self.block_of.values():
            self.hash_of[block] = None
        if self.news is not None:
            self.news.update(dict.fromkeys(self.block_of, False))
        self.block_of.clear()
        return count
