"""Fairness: how much each tenant has been served, and how evenly. Kept by the scheduler, asked by its queue.

The Virtual Token Counter of Sheng et al. 2024, "Fairness in Serving Large Language Models" (OSDI): a tenant's
counter grows with the weighted tokens it is served, and of those who wait, the one with the smallest counter is
admitted next. Who comes back from idleness is lifted to the smallest counter of those who wait, so
that nobody saves up a claim while away. Two tenants who always have something waiting are then served alike,
within 2 * max(prompt weight * longest prompt, output weight * tokens of a running batch): their theorem.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from cumulo.base.quantiles import jain_index

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0  # the paper's: drawing a token costs about twice as much as reading one
WINDOW_S = 60.0  # what the index looks at
_SLICE_S = 1.0
RECENT_HALF_LIFE_S = 10.0  # of what `Tenant.recent` remembers
ABOUT_S = 30.0  # a tenant whose last request ended this long ago is gone: steps need not be shared with it
_MANY_TENANTS = 1024  # beyond this, those that are away and owe nothing are forgotten


class Tenant:
    """One who is owed a fair share: an API key, or everybody where there are no keys."""

    __slots__ = (
        "_lift", "_recent", "_recent_of", "_recent_s", "_told", "computed_tokens", "name", "output_tokens",
        "prompt_tokens", "requests", "rested", "served_at_slice", "waiting",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        # Of admitted prompts, to be computed for it; what the prefix cache had is nobody's work.
        self.prompt_tokens = 0
        self.computed_tokens = 0  # ... of these, in steps so far
        self.output_tokens = 0  # drawn for it, all samples and beams
        self.requests = 0  # in the scheduler
        self.waiting = 0  # sequences that wait; kept by the queue
        self.rested = True  # nothing waited at some moment of the present slice
        self.served_at_slice = 0.0
        self._lift = 0.0
        self._told = (0, 0)
        self._recent, self._recent_of, self._recent_s = 0.0, 0.0, 0.0

    @property
    def served(self) -> float:
        """Weighted tokens served: the paper's cost function."""
        return PROMPT_WEIGHT * self.prompt_tokens + OUTPUT_WEIGHT * self.output_tokens

    @property
    def counter(self) -> float:
        return self._lift + self.served

    def lift(self, level: float) -> None:
        """Back from idleness: what it did not ask for meanwhile is not owed to it."""
        self._lift = max(self._lift, level - self.served)

    def recent(self, now_s: float) -> float:
        """Weighted tokens computed in the last seconds, older ones counting less and less."""
        served = PROMPT_WEIGHT * self.computed_tokens + OUTPUT_WEIGHT * self.output_tokens
        now_s = max(now_s, self._recent_s)
        aged = 0.5 ** ((now_s - self._recent_s) / RECENT_HALF_LIFE_S)
        self._recent = self._recent * aged + served - self._recent_of
        self._recent_of, self._recent_s = served, now_s
        return self._recent

    def lift_recent(self, level: float, now_s: float) -> None:
        """Back after a while: what it was not served while away is not owed to it in the next seconds."""
        self._recent = max(self.recent(now_s), level)

    def take_served(self) -> tuple[int, int]:
        """Prompt and output tokens since this was last asked."""
        prompt, output = self._told
        self._told = (self.prompt_tokens, self.output_tokens)
        return self.prompt_tokens - prompt, self.output_tokens - output

    def may_be_forgotten(self, level: float) -> bool:
        """Away, all it was served has been told, and on its return it would be lifted to `level` anyway."""
        told = self._told == (self.prompt_tokens, self.output_tokens)
        return self.requests == 0 and told and self.counter <= level


@dataclass(frozen=True, slots=True)
class _Slice:
    """About a second in which at least two tenants had something waiting all the time: what each was served."""

    ended_s: float
    served: dict[str, float]


class FairShares:
    """All tenants, and the last minute's record of who was served while waiting."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self._slices: deque[_Slice] = deque()
        self._slice_ends_s: float | None = None
        self._forget_beyond = _MANY_TENANTS
        self.ever_keys = False  # has a tenant come that is known by a name?
        self._here: dict[str, Tenant] = {}  # that have requests
        # When the last request of others ended; oldest first.
        self._left_s: OrderedDict[str, float] = OrderedDict()

    # -- who is about -------------------------------------------------------------------------------------
    def came(self, tenant: Tenant, now_s: float) -> None:
        """One more request of this tenant."""
        tenant.requests += 1
        if tenant.requests == 1:
            if self._left_s.pop(tenant.name, None) is None and (others := self.about()):
                tenant.lift_recent(min(one.recent(now_s) for one in others), now_s)
            self._here[tenant.name] = tenant
            self.ever_keys = self.ever_keys or tenant.name != ""

    def went(self, tenant: Tenant, now_s: float) -> None:
        tenant.requests -= 1
        if tenant.requests == 0:
            del self._here[tenant.name]
            self._left_s[tenant.name] = now_s

    @property
    def here(self) -> int:
        """Tenants that have requests."""
        return len(self._here)

    @property
    def has_keys(self) -> bool:
        """Whether a tenant that has requests is known by a name: then others may come."""
        return any(self._here)

    def several_about(self, now_s: float) -> bool:
        """Whether more than one tenant has requests, or had some a moment ago and may be back at any time."""
        while self._left_s and next(iter(self._left_s.values())) < now_s - ABOUT_S:
            self._left_s.popitem(last=False)
        return len(self._here) + len(self._left_s) > 1

    def about(self) -> list[Tenant]:
        """Those who have requests, or (as of `several_about`) had some a moment ago."""
        left = [self.tenants[name] for name in self._left_s if name in self.tenants]
        return [*self._here.values(), *left]

    def tenant(self, name: str) -> Tenant:
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = Tenant(name)
        return found

    def forget_idle(self, level: float) -> None:
        """Drop tenants with whom nothing is lost, each time the known ones have doubled in number."""
        if len(self.tenants) > self._forget_beyond:
            for tenant in [one for one in self.tenants.values() if one.may_be_forgotten(level)]:
                del self.tenants[tenant.name]
            self._forget_beyond = max(_MANY_TENANTS, 2 * len(self.tenants))

    def take_served(self) -> list[tuple[str, int, int]]:
        """Who was served since this was last asked: name, prompt tokens, output tokens."""
        told = ((tenant.name, *tenant.take_served()) for tenant in self.tenants.values())
        return [row for row in told if row[1] or row[2]]

    # -- how even it was ----------------------------------------------------------------------------------
    def tick(self, now_s: float) -> None:
        """Called before every step; does something about once a second."""
        if self._slice_ends_s is not None and now_s < self._slice_ends_s:
            return
        served: dict[str, float] = {}
        for tenant in self.tenants.values():
            total = tenant.served
            if not tenant.rested:
                served[tenant.name] = total - tenant.served_at_slice
            tenant.served_at_slice, tenant.rested = total, tenant.waiting == 0
        if len(served) > 1:
            self._slices.append(_Slice(now_s, served))
        self._slice_ends_s = now_s + _SLICE_S

    def index(self, now_s: float) -> float:
        """Jain's index of the last minute.

        Of each tenant, its service is taken relative to an even share, over the seconds in which it and at least
        one other had something waiting all the time. 1 where there was no such second: nobody was denied anything.
        """
        while self._slices and self._slices[0].ended_s < now_s - WINDOW_S:
            self._slices.popleft()
        got: dict[str, float] = {}
        due: dict[str, float] = {}
        for one in self._slices:
            share = sum(one.served.values()) / len(one.served)
            for name, served in one.served.items():
                got[name] = got.get(name, 0.0) + served
                due[name] = due.get(name, 0.0) + share
        return jain_index([got[name] / due[name] for name in got if due[name] > 0])
