"""Routing: which replica gets a request, decided from a snapshot. The fleet of `cumulo serve` and the fleet
simulator call it.

A router sees each replica as plain data: its state, its load, its speed, and the hashes of the KV blocks that it
holds. Its Route says why, and what the second choice would have cost.

    chosen = PrefixAware().route(Ask(prompt_tokens=900, hashes=hashes), replicas)
    chosen.replica, chosen.cached_tokens, chosen.ttft_s, chosen.why, chosen.second
"""

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.errors import ConfigError, CumuloError


class NoReplica(CumuloError):
    """No replica takes requests; the message says why for each."""


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
    # Of the waiting tokens, how many by priority and tenant; empty: nobody goes before anybody.
    queues: Mapping[tuple[int, str], int] = field(default_factory=dict)
    refuses: str = ""  # why it takes no request: it drains, or restarts; empty: it takes them
    silent: bool = False  # it has not been heard of lately: chosen only if no other can be

    @property
    def load_s(self) -> float:
        return self.waiting_tokens / self.prompt_tok_s + self.running * self.step_s


@dataclass(frozen=True, slots=True)
class Ask:
    """What a router knows of a request."""

    prompt_tokens: int
    hashes: Sequence[BlockHash] = ()  # of the prompt's full blocks, in order
    session: str = ""  # requests of one session prefer one replica
    tenant: str = ""
    priority: int = 0  # lower goes first
    tried: frozenset[str] = frozenset()  # replicas that it comes from: they failed, or are to be relieved


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, or could go."""

    replica: str
    ttft_s: float  # expected there
    cached_tokens: int  # of its prompt
    why: str = ""
    second: "Route | None" = None  # the next best; None: there was no other


class Router(Protocol):
    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        """Raises NoReplica where none takes the request."""
        ...

    def forget(self, replica: str) -> None:
        """It has lost its cache, or is gone."""
        ...


def usable(ask: Ask, replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    """The replicas to choose from: those that take requests, without those it was tried on or that are silent as
    long as there are others."""
    taking = [one for one in replicas if not one.refuses and one.name not in ask.tried]
    if not taking:
        states = ", ".join(f"{one.name} {one.refuses or 'was tried'}" for one in replicas)
        raise NoReplica(f"no replica takes this request: {states or 'there is none'}")
    return [one for one in taking if not one.silent] or taking


def tokens_ahead(ask: Ask, replica: ReplicaView, own_tokens: int) -> int:
    """Waiting tokens that the engine computes before this request: all of more important ones; of equally
    important ones each tenant's share, because tenants take turns (nobody waits for more of another than of
    their own)."""
    if not replica.queues:
        return replica.waiting_tokens
    mine = own_tokens + replica.queues.get((ask.priority, ask.tenant), 0)
    ahead = 0
    for (priority, tenant), tokens in replica.queues.items():
        if priority < ask.priority:
            ahead += tokens
        elif priority == ask.priority:
            ahead += tokens if tenant == ask.tenant else min(tokens, mine)
    return ahead


def held_tokens(ask: Ask, replica: ReplicaView, promised: Container[BlockHash] = ()) -> int:
    """Prompt tokens whose KV the replica has: its blocks are looked up in order, up to the first it does not
    hold.

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
    """TTFT there: its queue of prompts and this one's uncached rest at the speed of prompts, and a step to draw
    the token. Where all places are taken, a request waits for one: on average a share of a step for each in
    excess."""
    cached = held_tokens(ask, replica, promised)
    own = ask.prompt_tokens - cached
    compute_s = (tokens_ahead(ask, replica, own) + own) / replica.prompt_tok_s
    in_excess = max(0, replica.running + 1 - replica.max_running)
    return Route(replica.name, compute_s + replica.step_s * (1 + in_excess), cached)


@dataclass(slots=True)
class RoundRobin:
    """Replicas take turns, whatever their load and caches."""

    turn: int = 0

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        taking = usable(ask, replicas)
        chosen, second = (taking[(self.turn + ahead) % len(taking)] for ahead in (0, 1))
        self.turn += 1
        other = expected(ask, second) if second is not chosen else None
        return replace(expected(ask, chosen), why="its turn", second=other)

    def forget(self, replica: str) -> None:
        pass


@dataclass(slots=True)
class LeastLoaded:
    """The fewest uncomputed prompt tokens and running sequences. Blind to caches."""

    given: dict[str, int] = field(default_factory=dict)  # among equals, whoever has had the fewest

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        chosen, *others = sorted(
            usable(ask, replicas), key=lambda one: (one.load_s, one.running, self.given.get(one.name, 0))
        )
        self.given[chosen.name] = self.given.get(chosen.name, 0) + 1
        why = f"the least load: {chosen.waiting_tokens:,} prompt tokens wait, {chosen.running} sequences run"
        second = expected(ask, others[0]) if others else None
        return replace(expected(ask, chosen), why=why, second=second)

    def forget(self, replica: str) -> None:
        self.given.pop(replica, None)


@dataclass(slots=True)
class PrefixAware:
    """The shortest expected TTFT plus the work that the request makes. Among equals, up to `alike`, whoever was
    given the least work: new prefixes spread. A session stays where it was while that costs at most `loyalty_s`.

    A replica that has been given more than `most_load` times the mean work is passed over as long as another has
    not, however much of the prompt it holds: queues that are short now say nothing of the work it will have. Work
    is counted in prompt tokens that were not cached, and forgotten with time.
    """

    most_load: float = 1.25
    little_s: float = 1.0  # while replicas were given less work than this on average, none has too much
    work_counts: float = 1.5  # a second of work that a request makes, against a second of its own wait
    # Costs that differ by less are equal. Measured steps always differ a little, and whoever was a little faster
    # lately would get every new prefix.
    alike: float = 0.05
    loyalty_s: float = 0.005
    forgotten: float = 0.001  # of all work, at each request
    given_tokens: dict[str, float] = field(default_factory=dict)
    # Hashes of prompts that each replica was given lately: it holds them soon, though it has not said so.
    promised: dict[str, OrderedDict[BlockHash, None]] = field(default_factory=dict)
    max_promised: int = 20_000  # blocks of a replica
    sessions: OrderedDict[str, str] = field(default_factory=OrderedDict)
    max_sessions: int = 100_000

    def route(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Route:
        taking = usable(ask, replicas)
        calm = self._calm(ask, taking)
        found = [(expected(ask, one, self.promised.get(one.name, ())), one) for one in calm]
        costs_s = {option.replica: self._cost_s(ask, option, one) for option, one in found}
        bound_s = (1 + self.alike) * min(costs_s.values())
        found.sort(key=lambda pair: self._rank(pair[1], costs_s[pair[1].name], bound_s))
        options = [option for option, _ in found]
        home, most_s = self.sessions.get(ask.session), costs_s[options[0].replica] + self.loyalty_s
        stays = next((one for one in options if one.replica == home and costs_s[one.replica] <= most_s), None)
        chosen = stays or options[0]
        self._note(ask, chosen)
        passed = [expected(ask, one) for one in taking if one.name not in costs_s]  # given too much
        second = next((one for one in options + passed if one is not chosen), None)
        why = _why(ask, chosen, stays is not None, [one.replica for one in passed])
        return replace(chosen, why=why, second=second)

    def forget(self, replica: str) -> None:
        self.promised.pop(replica, None)
        self.given_tokens.pop(replica, None)

    def _note(self, ask: Ask, chosen: Route) -> None:
        for name in self.given_tokens:
            self.given_tokens[name] *= 1 - self.forgotten
        self.given_tokens[chosen.replica] += ask.prompt_tokens - chosen.cached_tokens
        self._promise(chosen.replica, ask.hashes)
        if ask.session:
            self.sessions[ask.session] = chosen.replica
            self.sessions.move_to_end(ask.session)
            if len(self.sessions) > self.max_sessions:
                self.sessions.popitem(last=False)

    def _rank(self, replica: ReplicaView, cost_s: float, bound_s: float) -> tuple[float, ...]:
        if cost_s > bound_s:
            return cost_s, 0.0, 0.0
        return 0.0, self.given_tokens[replica.name], replica.load_s

    def _cost_s(self, ask: Ask, option: Route, replica: ReplicaView) -> float:
        """The request's own wait, and the work it makes, for which others will wait."""
        return (
            option.ttft_s
            + self.work_counts * (ask.prompt_tokens - option.cached_tokens) / replica.prompt_tok_s
        )

    def _calm(self, ask: Ask, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        """Replicas that have not been given too much; the least busy one always is among them. One that joins
        starts level with it, instead of getting everything until it has caught up."""
        known = [self.given_tokens[one.name] for one in replicas if one.name in self.given_tokens]
        for one in replicas:
            self.given_tokens.setdefault(one.name, min(known, default=0.0))
        mean = sum(self.given_tokens[one.name] for one in replicas) / len(replicas)
        if mean < self.little_s * replicas[0].prompt_tok_s:
            return replicas
        bound = self.most_load * mean + ask.prompt_tokens
        return [one for one in replicas if self.given_tokens[one.name] <= bound]

    def _promise(self, replica: str, hashes: Sequence[BlockHash]) -> None:
        promised = self.promised.setdefault(replica, OrderedDict())
        for block_hash in hashes:
            promised[block_hash] = None
            promised.move_to_end(block_hash)
        while len(promised) > self.max_promised:
            promised.popitem(last=False)


def _why(ask: Ask, chosen: Route, stays: bool, passed_over: Sequence[str]) -> str:
    why = "its session's replica" if stays else "the shortest expected TTFT and least work"
    if chosen.cached_tokens:
        why += f": {chosen.cached_tokens:,} of {ask.prompt_tokens:,} prompt tokens are cached there"
    if passed_over:
        why += f"; {', '.join(passed_over)} had been given too much work"
    return why


ROUTERS: dict[str, type[RoundRobin] | type[LeastLoaded] | type[PrefixAware]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


def router(name: str) -> Router:
    if name not in ROUTERS:
        raise ConfigError(f"there is no router {name!r}; use one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
