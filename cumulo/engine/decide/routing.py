"""Routing: which replica gets a request, decided from a snapshot. The gateway and the fleet simulator call it.

A router sees each replica as plain data: its load, its speed, and the hashes of the KV blocks that it holds. It
returns a Route, which says why: the time to first token that it expects there, how many prompt tokens are cached,
and what the second choice would have cost.

    chosen = PrefixAware().route(Ask(prompt_tokens=900, hashes=hashes), replicas)
    chosen.replica, chosen.cached_tokens, chosen.why
"""

from collections import OrderedDict
from collections.abc import Container, Sequence, Set
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


def held_tokens(ask: Ask, replica: ReplicaView, promised: Container[BlockHash] = ()) -> int:
    """Prompt tokens whose KV the replica has: its blocks are looked up in order, up to the first it does not hold.

    At least one token is computed, because the first output token comes from it. `promised`: blocks that requests
    in its queue will have filled by then.
    """
    held = 0
    for block_hash in ask.hashes:
        if block_hash not in replica.blocks and block_hash not in promised:
            break
        held += 1
    return min(held * replica.block_size, max(0, ask.prompt_tokens - 1))


def expected(ask: Ask, replica: ReplicaView, promised: Container[BlockHash] = ()) -> Option:
    """TTFT there: its queue of prompts and this one's uncached rest at the speed of prompts, and a step to draw the
    token. Where all places are taken, a request waits for one: on average a share of a step for each in excess."""
    cached = held_tokens(ask, replica, promised)
    compute_s = (replica.waiting_tokens + ask.prompt_tokens - cached) / replica.prompt_tok_s
    in_excess = max(0, replica.running + 1 - replica.max_running)
    return Option(replica.name, compute_s + replica.step_s * (1 + in_excess), cached)


@dataclass(slots=True)
class RoundRobin:
    """In turn, weights obeyed: the replica that has had the least for its weight. Blind to load and caches."""

    name: str = "round-robin"
    given: dict[str, float] = field(default_factory=dict)

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        options = usable(ask, replicas)
        # One that joins later starts level with the others, instead of getting everything until it has caught up.
        level = min(
            (self.given[one.name] / one.weight for one in options if one.name in self.given), default=0.0
        )
        for one in options:
            self.given.setdefault(one.name, level * one.weight)
        chosen = min(options, key=lambda one: (self.given[one.name] + 1) / one.weight)
        self.given[chosen.name] += 1
        found = expected(ask, chosen)
        return Route(chosen.name, found.ttft_s, found.cached_tokens, "its turn")


@dataclass(slots=True)
class LeastLoaded:
    """The fewest uncomputed prompt tokens and running sequences, for its weight. Blind to caches."""

    name: str = "least-loaded"
    given: dict[str, int] = field(default_factory=dict)  # among equals, whoever has had the fewest

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        options = sorted(
            usable(ask, replicas),
            key=lambda one: (
                _load_s(one) / one.weight,
                one.running,
                self.given.get(one.name, 0) / one.weight,
            ),
        )
        chosen = options[0]
        self.given[chosen.name] = self.given.get(chosen.name, 0) + 1
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

    A replica that has been given more than `most_load` times the mean work is passed over as long as another has
    not, however much of the prompt it holds: queues that are short now say nothing of the work it will have. Work
    is counted in prompt tokens that were not cached, and forgotten with time. A session stays where it was while
    that costs at most `loyalty_s`.
    """

    name: str = "prefix-aware"
    most_load: float = 1.25
    loyalty_s: float = 0.005
    work_counts: float = 1.5  # a second of work that a request makes, against a second of its own wait
    forget: float = 0.001  # of all work, at each request
    given_tokens: dict[str, float] = field(default_factory=dict)
    # Hashes of prompts that each replica was given lately: it holds them soon, though it has not said so.
    promised: dict[str, OrderedDict[BlockHash, None]] = field(default_factory=dict)
    max_promised: int = 20_000  # blocks of a replica
    sessions: dict[str, str] = field(default_factory=dict)
    max_sessions: int = 100_000

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        views = usable(ask, replicas)
        calm = self._calm(views, ask)
        options = sorted(
            ((expected(ask, one, self.promised.get(one.name, ())), one) for one in calm),
            key=lambda pair: (self._cost_s(ask, *pair), _load_s(pair[1]), len(pair[1].blocks)),
        )
        best = options[0][0]
        home = self.sessions.get(ask.session) if ask.session else None
        stays = next((option for option, _ in options if option.replica == home), None)
        chosen = stays if stays is not None and stays.ttft_s <= best.ttft_s + self.loyalty_s else best
        if ask.session:
            self._remember(ask.session, chosen.replica)
        for name in self.given_tokens:
            self.given_tokens[name] *= 1 - self.forget
        self.given_tokens[chosen.replica] += ask.prompt_tokens - chosen.cached_tokens
        self._promise(chosen.replica, ask.hashes)
        second = next((option for option, _ in options if option.replica != chosen.replica), None)
        return Route(chosen.replica, chosen.ttft_s, chosen.cached_tokens, _why(ask, chosen, stays), second)

    def _cost_s(self, ask: Ask, option: Option, replica: ReplicaView) -> float:
        """The request's own wait, and the work it makes, for which others will wait."""
        work_s = (ask.prompt_tokens - option.cached_tokens) / replica.prompt_tok_s
        return (option.ttft_s + self.work_counts * work_s) / replica.weight

    def _calm(self, views: list[ReplicaView], ask: Ask) -> list[ReplicaView]:
        """Those that have not been given too much. One that joins starts level with the least busy."""
        level = min(
            (self.given_tokens[one.name] for one in views if one.name in self.given_tokens), default=0.0
        )
        for one in views:
            self.given_tokens.setdefault(one.name, level)
        mean = sum(self.given_tokens[one.name] / one.weight for one in views) / len(views)
        bound = self.most_load * mean + ask.prompt_tokens
        return [one for one in views if self.given_tokens[one.name] / one.weight <= bound] or views

    def _promise(self, replica: str, hashes: Sequence[BlockHash]) -> None:
        promised = self.promised.setdefault(replica, OrderedDict())
        for block_hash in hashes:
            promised[block_hash] = None
            promised.move_to_end(block_hash)
        while len(promised) > self.max_promised:
            promised.popitem(last=False)

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
