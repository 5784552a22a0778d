"""FairQueue: which guide is compiled next, fair to keys. Owned by GuideChecker; pure, the clock is given.

Every guide has a short try first; the few that need longer go to the slow lane, which has a worker of its own. In
each lane the key goes first that has used the least compiling time lately, so a key that sends many slow guides
waits for itself, and the others wait for one short try of it at most.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from cumulo.engine.decide.params import Guide
from cumulo.serve.engine_link.messages import Submit

MOST_WAITING = 128  # different guides of one key
_FORGOTTEN_HALF_S = 20.0  # after this time half of what a key has used is forgotten

Lane = Literal["quick", "slow"]


@dataclass(slots=True)
class Waiting:
    """A guide that is to be compiled, and the requests of one key that wait for it."""

    guide: Guide
    tenant: str
    submits: list[Submit]
    lane: Lane = "quick"


@dataclass(slots=True)
class _Key:
    used_s: float = 0.0
    at_s: float = 0.0  # when `used_s` was that
    lanes: dict[Lane, deque[Waiting]] = field(default_factory=lambda: {"quick": deque(), "slow": deque()})

    def used_lately_s(self, now_s: float) -> float:
        age: float = max(0.0, now_s - self.at_s) / _FORGOTTEN_HALF_S
        return self.used_s * math.exp2(-age)

    @property
    def waiting(self) -> int:
        return sum(map(len, self.lanes.values()))


class FairQueue:
    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._keys: dict[str, _Key] = {}

    def add(self, submit: Submit, guide: Guide) -> bool:
        """False: this key has too many guides waiting. Requests that wait for the same guide count once."""
        key = self._keys.setdefault(submit.tenant, _Key())
        for lane in key.lanes.values():
            for waiting in lane:
                if waiting.guide == guide:
                    waiting.submits.append(submit)
                    return True
        if key.waiting >= self._most_waiting:
            return False
        key.lanes["quick"].append(Waiting(guide, submit.tenant, [submit]))
        return True

    def add_slow(self, waiting: Waiting) -> None:
        """Its short try was not enough."""
        waiting.lane = "slow"
        self._keys.setdefault(waiting.tenant, _Key()).lanes["slow"].append(waiting)

    def next_job(self, lanes: tuple[Lane, ...], now_s: float) -> Waiting | None:
        """The next guide of the first of these lanes that has one."""
        for lane in lanes:
            ready = [key for key in self._keys.values() if key.lanes[lane]]
            if ready:
                return min(ready, key=lambda key: key.used_lately_s(now_s)).lanes[lane].popleft()
        return None

    def charge(self, tenant: str, used_s: float, now_s: float) -> None:
        key = self._keys.setdefault(tenant, _Key())
        key.used_s, key.at_s = key.used_lately_s(now_s) + used_s, now_s

    def forget_idle(self, now_s: float) -> None:
        """Keys that wait for nothing and have used next to nothing."""
        self._keys = {
            name: key for name, key in self._keys.items() if key.waiting or key.used_lately_s(now_s) > 1e-3
        }

    def __len__(self) -> int:
        return sum(key.waiting for key in self._keys.values())
