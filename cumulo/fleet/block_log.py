"""BlockLog: which KV blocks the engines hold, and what changed lately, for gateways that follow. Owned by Service.

A gateway is told what came and went since it was told last; one that is too far behind is told everything.
"""

from collections import deque
from collections.abc import Set

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.fleet.wire import HASH_BYTES, packed_hashes

_ENGINE_HASH_BYTES = 16
_KEPT_CHANGES = 2_000


class BlockLog:
    def __init__(self) -> None:
        self._blocks: set[BlockHash] = set()  # by their first HASH_BYTES
        self._changes: deque[tuple[list[BlockHash], list[BlockHash]]] = deque(maxlen=_KEPT_CHANGES)
        self._version = 0  # changes so far
        self._restarts = 0

    def note(self, came: bytes, went: bytes, restarts: int) -> None:
        """What an engine reports. `restarts`: of the engine so far; a new one holds nothing."""
        if restarts != self._restarts:
            self._restarts = restarts
            self.become(frozenset())
        if came or went:
            self._change(_cut(came), _cut(went))

    def become(self, blocks: Set[BlockHash]) -> None:
        """These are held now: told of several engines together."""
        now = {one[:HASH_BYTES] for one in blocks}
        if now != self._blocks:
            self._change(list(now - self._blocks), list(self._blocks - now))

    def since(self, version: int | None) -> tuple[int, bool, str, str]:
        """The present version, whether to forget all first, and the hashes that came and went, packed."""
        behind = self._version - version if version is not None else None
        if behind is None or behind > len(self._changes):
            return self._version, True, packed_hashes(list(self._blocks)), ""
        came: dict[BlockHash, bool] = {}
        for added, removed in list(self._changes)[len(self._changes) - behind :]:
            came.update(dict.fromkeys(removed, False))
            came.update(dict.fromkeys(added, True))
        added = [one for one, is_here in came.items() if is_here]
        removed = [one for one, is_here in came.items() if not is_here]
        return self._version, False, packed_hashes(added), packed_hashes(removed)

    def _change(self, came: list[BlockHash], went: list[BlockHash]) -> None:
        self._blocks.difference_update(went)
        self._blocks.update(came)
        self._changes.append((came, went))
        self._version += 1


def _cut(joined: bytes) -> list[BlockHash]:
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), _ENGINE_HASH_BYTES)]
