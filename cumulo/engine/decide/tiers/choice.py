"""Fetch or compute: whether KV blocks that lie in a tier are worth moving. Asked where a sequence is seated and
where it arrives.
"""

from dataclasses import dataclass
from typing import Literal

Tier = Literal["host memory", "disk"]
_LEARN = 0.2


@dataclass(slots=True)
class TierCosts:
    """Measured while the engine runs; the starting value matters only before the first block is read."""

    disk_s_per_block: float = 2e-3

    def observe_disk(self, blocks: int, seconds: float) -> None:
        if blocks and seconds > 0:
            self.disk_s_per_block += _LEARN * (seconds / blocks - self.disk_s_per_block)


@dataclass(frozen=True, slots=True)
class FetchChoice:
    fetch: bool
    fetch_s: float
    compute_s: float


def choose_fetch(
    *, blocks: int, block_size: int, move_s_per_block: float, compute_s_per_token: float, ahead_s: float = 0.0
) -> FetchChoice:
    """A run of blocks is fetched if that is sooner than computing it. `ahead_s`: what is fetched before."""
    fetch_s = ahead_s + blocks * move_s_per_block
    compute_s = blocks * block_size * compute_s_per_token
    return FetchChoice(fetch_s < compute_s, fetch_s, compute_s)
