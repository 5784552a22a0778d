"""UpstreamReplica: one server behind the gateway: its connections, what it said of itself, and what it is
doing."""

import time
from typing import Any

from cumulo.engine.decide.routing import ReplicaView
from cumulo.fleet.decide.choosing import Breaker, Pace, Told
from cumulo.fleet.remote.options import PoolMember, RemoteOptions
from cumulo.fleet.wire import (
    ASK_HEADER,
    PROOF_HEADER,
    FleetAsk,
    FleetIdentity,
    FleetKey,
    FleetNews,
    written,
)
from cumulo.load.connection import Pool, UpstreamExchange

_MOST_IDLE = 256  # connections to one replica


class ReplicaWork:
    """One request on a replica: counts there until it is released."""

    __slots__ = ("begun_s", "exchange", "prompt_tokens", "replica", "streams")

    def __init__(self, replica: "UpstreamReplica", exchange: UpstreamExchange, prompt_tokens: int) -> None:
        self.replica, self.exchange, self.prompt_tokens = replica, exchange, prompt_tokens
        self.begun_s, self.streams = time.monotonic(), False
        replica.works.add(self)
        replica.waiting_tokens += prompt_tokens

    def note_answer(self, streams: bool) -> None:
        """An answer begins, so its prompt waits no longer."""
        self.streams = streams
        self.replica.waiting_tokens -= self.prompt_tokens
        self.prompt_tokens = 0

    def release(self) -> None:
        if self in self.replica.works:
            self.replica.works.discard(self)
            self.replica.waiting_tokens -= self.prompt_tokens
            self.exchange.close()


class UpstreamReplica:
    def __init__(self, member: PoolMember, options: RemoteOptions) -> None:
        self.member, self.name = member, member.url
        self.upstream = Pool(member.url, options.connect_timeout_s, _MOST_IDLE)
        self.breaker = Breaker(options.breaker_failures)
        self.told: Told | None = None  # None: it has never answered
        self.key = None if options.fleet_key is None else FleetKey(options.fleet_key)
        self.identity: FleetIdentity | None = None  # of a Cumulo server that knows the fleet's key
        self.news = FleetNews(ready=False)
        self.adapters: dict[str, str] = {}  # fingerprints by name, of a Cumulo server
        self.trouble = "has not answered yet"  # why it takes no requests; empty: it takes them
        self.refused = False  # it answers, but cannot be a replica here: the trouble says why
        self.draining = False  # an operator's wish
        self.works: set[ReplicaWork] = set()
        self.waiting_tokens = 0
        self.requests = self.failures = 0

    @property
    def short_name(self) -> str:
        return self.name.partition("//")[2]

    @property
    def is_cumulo(self) -> bool:
        return self.identity is not None

    def signed(self, method: str, path: str, ask: FleetAsk) -> list[tuple[bytes, bytes]]:
        """What a request to it has besides its own headers; nothing for a server that does not know the key."""
        if self.key is None or not self.is_cumulo:
            return []
        told = written(ask)
        return [(ASK_HEADER, told), (PROOF_HEADER, self.key.prove(method, path.encode("latin-1"), told))]

    @property
    def models(self) -> tuple[str, ...]:
        if self.told is None:
            return ()
        own = self.told.models if self.member.model is None else (self.member.model,)
        return (*own, *self.adapters)

    def parent_of(self, model: str) -> str | None:
        """The model that an adapter belongs to; None: it is none."""
        return self.identity.model if self.identity is not None and model in self.adapters else None

    def likeness(self, model: str | None) -> str:
        """Replicas of one likeness continue each other's answers; empty: of none."""
        return f"{self.identity.fingerprint} {self.adapters.get(model or '', '')}" if self.identity else ""

    def refuses(self, now_s: float) -> str:
        if self.trouble:
            return self.trouble
        if self.draining or self.news.draining:
            return "drains"
        return self.breaker.refuses(now_s)

    @property
    def pace(self) -> Pace:
        return Pace(self.news.prompt_tok_s, self.news.step_s)

    def view(self, usual: Pace, now_s: float, block_tokens: int) -> ReplicaView:
        """`block_tokens`: of a block of text, the unit in which the router remembers what it sent there."""
        news, identity = self.news, self.identity
        return ReplicaView(
            self.name,
            waiting_tokens=max(self.waiting_tokens, news.waiting_tokens),
            running=max(len(self.works), news.running + news.waiting),
            max_running=identity.max_running if identity is not None else 256,
            prompt_tok_s=news.prompt_tok_s or usual.prompt_tok_s,
            step_s=news.step_s or usual.step_s,
            block_size=block_tokens,
            refuses=self.refuses(now_s),
        )

    def described(self) -> dict[str, Any]:
        """Returns what /v1/fleet says of it."""
        now_s, news, identity = time.monotonic(), self.news, self.identity
        refuses = self.refuses(now_s)
        return {
            "name": self.short_name,
            "object": "fleet.replica",
            "url": self.name,
            "state": "ready" if not refuses else "draining" if refuses == "drains" else "unavailable",
            "detail": refuses or None,
            "kind": "cumulo" if identity is not None else "openai",
            "models": list(self.models),
            "adapters": sorted(self.adapters),
            "weight": self.member.weight,
            "version": identity.version if identity is not None else None,
            "fingerprint": identity.fingerprint if identity is not None else None,
            "in_flight": len(self.works),
            "running": news.running,
            "waiting": news.waiting,
            "waiting_tokens": max(self.waiting_tokens, news.waiting_tokens),
            "prompt_tok_s": news.prompt_tok_s or None,
            "step_ms": news.step_s * 1e3 if news.step_s else None,
            "breaker": self.breaker.state(now_s),
            "requests": self.requests,
            "failures": self.failures,
        }

    # -- news ---------------------------------------------------------------------------------------------
    def take_news(self, news: FleetNews) -> None:
        self.news = news
        if news.adapters is not None:
            self.adapters = news.adapters

    def lose(self, trouble: str) -> None:
        """It is dead, or as good as dead: whoever waits for it need not."""
        self.trouble = trouble
        self.news = FleetNews(ready=False)
        self.upstream.close()
        for work in list(self.works):
            work.exchange.fail(trouble)

    def move_away(self) -> None:
        """Running requests of this replica are continued elsewhere."""
        for work in list(self.works):
            work.exchange.fail("is being drained")

    def close(self) -> None:
        self.upstream.close()
