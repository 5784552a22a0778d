"""Routing: which replica gets a request, decided from a snapshot. The gateway and the fleet simulator call it.

A router sees each replica as plain data: its load, its speed, and the hashes of the KV blocks that it holds. It
returns a Route, which says why: the time to first token that it expects there, how many prompt tokens are cached,
and what the second choice would have cost.

    chosen = PrefixAware().route(Ask(prompt_tokens=900, hashes=hashes), replicas)
    chosen.replica, chosen.cached_tokens, chosen.why
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from cumulo.engine.decide.block_pool import BlockHash
from cumulo.errors import ConfigError, Overloaded


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as a router sees it."""

    name: str
    waiting_tokens: int = 0  # prompt tokens that it has accepted and not computed yet
    running: int = 0  # sequences that run or wait
    max_running: int = 256
    prompt_tok_s: float = 10_000.0  # how fast it computes prompts
    step_s: float = 0.02  # of one step in which its running sequences decode
    block_size: int = 16
    blocks: Set[BlockHash] = field(default_factory=frozenset)  # hashes of the KV blocks it could share
    healthy: bool = True
    draining: bool = False
    weight: float = 1.0  # 0.1: a canary that gets a tenth of an ordinary replica's share


@dataclass(frozen=True, slots=True)
class Ask:
    """What a router knows of a request."""

    prompt_tokens: int
    hashes: Sequence[BlockHash] = ()  # of the prompt's full blocks, in order
    session: str = ""  # requests of one session prefer one replica
    tried: frozenset[str] = frozenset()  # replicas that failed this request


@dataclass(frozen=True, slots=True)
class Option:
    """What one replica would mean for a request."""

    replica: str
    ttft_s: float  # expected
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Route:
    replica: str
    ttft_s: float  # expected
    cached_tokens: int
    why: str
    second: Option | None = None  # None: there was no other


class Router(Protocol):
    name: str

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        """Raises Overloaded where no replica can take the request."""
        ...


def usable(ask: Ask, replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    """Replicas that may get a new request: first those that have not failed it, then any that lives."""
    alive = [one for one in replicas if one.healthy and not one.draining and one.weight > 0]
    fresh = [one for one in alive if one.name not in ask.tried]
    if not (fresh or alive):
        states = ", ".join(f"{one.name} {_trouble(one)}" for one in replicas)
        raise Overloaded(f"no replica can take a request: {states or 'there is none'}")
    return fresh or alive


def _trouble(replica: ReplicaView) -> str:
    return "does not answer" if not replica.healthy else "is draining" if replica.draining else "has weight 0"


def held_tokens(ask: Ask, replica: ReplicaView) -> int:
    """Prompt tokens whose KV the replica has: its blocks are looked up in order, up to the first it does not hold.

    At least one token is computed, because the first output token comes from it.
    """
    held = 0
    for block_hash in ask.hashes:
        if block_hash not in replica.blocks:
            break
        held += 1
    return min(held * replica.block_size, max(0, ask.prompt_tokens - 1))


def expected(ask: Ask, replica: ReplicaView) -> Option:
    """TTFT there: its queue of prompts and this one's uncached rest at the speed of prompts, and a step to draw the
    token. Where all places are taken, a request waits for one: on average a share of a step for each in excess."""
    cached = held_tokens(ask, replica)
    compute_s = (replica.waiting_tokens + ask.prompt_tokens - cached) / replica.prompt_tok_s
    in_excess = max(0, replica.running + 1 - replica.max_running)
    return Option(replica.name, compute_s + replica.step_s * (1 + in_excess), cached)


@dataclass(slots=True)
class RoundRobin:
    """In turn, weights obeyed: the replica that has had the least for its weight. Blind to load and caches."""

    name: str = "round-robin"
    given: dict[str, int] = field(default_factory=dict)

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        options = usable(ask, replicas)
        # One that joins later starts level with the others, instead of getting everything until it has caught up.
        level = min((self.given[one.name] for one in options if one.name in self.given), default=0)
        chosen = min(options, key=lambda one: (self.given.get(one.name, level) + 1) / one.weight)
        self.given[chosen.name] = self.given.get(chosen.name, level) + 1
        found = expected(ask, chosen)
        return Route(chosen.name, found.ttft_s, found.cached_tokens, "its turn")


@dataclass(slots=True)
class LeastLoaded:
    """The fewest uncomputed prompt tokens and running sequences, for its weight. Blind to caches."""

    name: str = "least-loaded"

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        options = sorted(usable(ask, replicas), key=lambda one: (_load_s(one) / one.weight, one.running))
        chosen = options[0]
        found = expected(ask, chosen)
        why = f"least load: {chosen.waiting_tokens:,} prompt tokens wait, {chosen.running} sequences run"
        return Route(
            chosen.name,
            found.ttft_s,
            found.cached_tokens,
            why,
            expected(ask, options[1]) if options[1:] else None,
        )


def _load_s(replica: ReplicaView) -> float:
    return replica.waiting_tokens / replica.prompt_tok_s + replica.running * replica.step_s


@dataclass(slots=True)
class PrefixAware:
    """The shortest expected TTFT, cached tokens considered. Among equals the least loaded: new prefixes spread.

    A replica whose load is above `most_load` times the mean is passed over as long as another is below, however
    much of the prompt it holds: its queue would grow for everybody. A session stays where it was while that costs
    at most `loyalty_s`.
    """

    name: str = "prefix-aware"
    most_load: float = 1.25
    loyalty_s: float = 0.005
    sessions: dict[str, str] = field(default_factory=dict)
    max_sessions: int = 100_000

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        views = usable(ask, replicas)
        mean_s = sum(_load_s(one) for one in views) / len(views)
        bound_s = self.most_load * mean_s + max(one.step_s for one in views)
        calm = [one for one in views if _load_s(one) / one.weight <= bound_s] or views
        options = sorted(
            ((expected(ask, one), one) for one in calm),
            key=lambda pair: (pair[0].ttft_s / pair[1].weight, _load_s(pair[1]), len(pair[1].blocks)),
        )
        best = options[0][0]
        home = self.sessions.get(ask.session) if ask.session else None
        stays = next((option for option, _ in options if option.replica == home), None)
        chosen = stays if stays is not None and stays.ttft_s <= best.ttft_s + self.loyalty_s else best
        if ask.session:
            self._remember(ask.session, chosen.replica)
        second = next((option for option, _ in options if option.replica != chosen.replica), None)
        return Route(chosen.replica, chosen.ttft_s, chosen.cached_tokens, _why(ask, chosen, stays), second)

    def _remember(self, session: str, replica: str) -> None:
        self.sessions.pop(session, None)  # to the end: the front is forgotten first
        self.sessions[session] = replica
        if len(self.sessions) > self.max_sessions:
            del self.sessions[next(iter(self.sessions))]


def _why(ask: Ask, chosen: Option, stays: Option | None) -> str:
    cached = (
        f"{chosen.cached_tokens:,} of {ask.prompt_tokens:,} prompt tokens are cached there"
        if chosen.cached_tokens
        else "no replica's cache is worth its queue"
    )
    return f"shortest expected TTFT: {cached}" if chosen is not stays else f"its session's replica: {cached}"


ROUTERS: dict[str, type[RoundRobin] | type[LeastLoaded] | type[PrefixAware]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


def router(name: str) -> Router:
    if name not in ROUTERS:
        raise ConfigError(f"there is no router {name!r}; use one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
