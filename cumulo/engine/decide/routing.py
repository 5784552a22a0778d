"""Routing: which replica gets a request, decided from a snapshot. The fleet simulator calls it.

A router sees each replica as plain data: its load, its speed, and the hashes of the KV blocks that it holds.

    chosen = PrefixAware().route(Ask(prompt_tokens=900, hashes=hashes), replicas)
    chosen.replica, chosen.cached_tokens, chosen.ttft_s
"""

from collections import OrderedDict
from collections.abc import Container, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from cumulo.engine.decide.block_pool import BlockHash
from cumulo.errors import ConfigError


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

    @property
    def load_s(self) -> float:
        return self.waiting_tokens / self.prompt_tok_s + self.running * self.step_s


@dataclass(frozen=True, slots=True)
class Ask:
    """What a router knows of a request."""

    prompt_tokens: int
    hashes: Sequence[BlockHash] = ()  # of the prompt's full blocks, in order


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, or could go."""

    replica: str
    ttft_s: float  # expected there
    cached_tokens: int  # of its prompt


class Router(Protocol):
    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route: ...


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


def expected(ask: Ask, replica: ReplicaView, promised: Container[BlockHash] = ()) -> Route:
    """TTFT there: its queue of prompts and this one's uncached rest at the speed of prompts, and a step to draw the
    token. Where all places are taken, a request waits for one: on average a share of a step for each in excess."""
    cached = held_tokens(ask, replica, promised)
    compute_s = (replica.waiting_tokens + ask.prompt_tokens - cached) / replica.prompt_tok_s
    in_excess = max(0, replica.running + 1 - replica.max_running)
    return Route(replica.name, compute_s + replica.step_s * (1 + in_excess), cached)


@dataclass(slots=True)
class RoundRobin:
    """In turn. Blind to load and caches."""

    turn: int = 0

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        chosen = replicas[self.turn % len(replicas)]
        self.turn += 1
        return expected(ask, chosen)


@dataclass(slots=True)
class LeastLoaded:
    """The fewest uncomputed prompt tokens and running sequences. Blind to caches."""

    given: dict[str, int] = field(default_factory=dict)  # among equals, whoever has had the fewest

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        chosen = min(replicas, key=lambda one: (one.load_s, one.running, self.given.get(one.name, 0)))
        self.given[chosen.name] = self.given.get(chosen.name, 0) + 1
        return expected(ask, chosen)


@dataclass(slots=True)
class PrefixAware:
    """The shortest expected TTFT plus the work that the request makes. Among equals the least loaded: new prefixes
    spread.

    A replica that has been given more than `most_load` times the mean work is passed over as long as another has
    not, however much of the prompt it holds: queues that are short now say nothing of the work it will have. Work
    is counted in prompt tokens that were not cached, and forgotten with time.
    """

    most_load: float = 1.25
    work_counts: float = 1.5  # a second of work that a request makes, against a second of its own wait
    forget: float = 0.001  # of all work, at each request
    given_tokens: dict[str, float] = field(default_factory=dict)
    # Hashes of prompts that each replica was given lately: it holds them soon, though it has not said so.
    promised: dict[str, OrderedDict[BlockHash, None]] = field(default_factory=dict)
    max_promised: int = 20_000  # blocks of a replica

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        found = [
            (expected(ask, one, self.promised.get(one.name, ())), one) for one in self._calm(ask, replicas)
        ]
        chosen, _ = min(
            found, key=lambda pair: (self._cost_s(ask, *pair), pair[1].load_s, len(pair[1].blocks))
        )
        for name in self.given_tokens:
            self.given_tokens[name] *= 1 - self.forget
        self.given_tokens[chosen.replica] += ask.prompt_tokens - chosen.cached_tokens
        self._promise(chosen.replica, ask.hashes)
        return chosen

    def _cost_s(self, ask: Ask, option: Route, replica: ReplicaView) -> float:
        """The request's own wait, and the work it makes, for which others will wait."""
        return (
            option.ttft_s
            + self.work_counts * (ask.prompt_tokens - option.cached_tokens) / replica.prompt_tok_s
        )

    def _calm(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        """Those that have not been given too much; the least busy one always is among them."""
        for one in replicas:
            self.given_tokens.setdefault(one.name, 0.0)
        mean = sum(self.given_tokens[one.name] for one in replicas) / len(replicas)
        bound = self.most_load * mean + ask.prompt_tokens
        return [one for one in replicas if self.given_tokens[one.name] <= bound]

    def _promise(self, replica: str, hashes: Sequence[BlockHash]) -> None:
        promised = self.promised.setdefault(replica, OrderedDict())
        for block_hash in hashes:
            promised[block_hash] = None
            promised.move_to_end(block_hash)
        while len(promised) > self.max_promised:
            promised.popitem(last=False)


ROUTERS: dict[str, type[RoundRobin] | type[LeastLoaded] | type[PrefixAware]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


def router(name: str) -> Router:
    if name not in ROUTERS:
        raise ConfigError(f"there is no router {name!r}; use one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
