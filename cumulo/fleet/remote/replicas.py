"""Replicas: the servers behind the gateway and the pools they form. They come, go and drain while it runs."""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass

from cumulo.engine.decide.routing import Ask, NoReplica, Route
from cumulo.errors import CumuloError
from cumulo.fleet.decide.choosing import Chooser, usual_pace
from cumulo.fleet.decide.prompt_text import TEXT_BLOCK
from cumulo.fleet.remote.options import PoolMember, RemoteOptions
from cumulo.fleet.remote.replica import UpstreamReplica
from cumulo.fleet.remote.watch import Watch

log = logging.getLogger(__name__)
_USUAL_TOKENS_PER_BYTE = 0.25
_LEARNING = 0.1  # the weight of a new prompt in the mean


@dataclass(frozen=True, slots=True)
class PromptHint:
    """What a request brings to the choice of its replica."""

    model: str | None
    chain: list[bytes]
    text_bytes: int
    session: str = ""
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ChosenReplica:
    replica: UpstreamReplica
    route: Route
    prompt_tokens: int  # about


class UnknownModel(CumuloError):
    """No replica serves it."""


class Replicas:
    def __init__(self, options: RemoteOptions) -> None:
        self.options = options
        self.replicas: dict[str, UpstreamReplica] = {}
        self._watches: dict[str, tuple[Watch, asyncio.Task[None]]] = {}
        self._choosers: dict[str | None, Chooser] = {}
        self._tokens_per_byte: dict[str | None, float] = {}  # by model
        self.ended = False
        self._changed = asyncio.Event()

    # -- life ---------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Ask every server what it is. Raises CumuloError if one cannot belong here. One that does not answer yet,
        or is not ready, is asked on, and joins when it is: gateway and servers may be started in any order."""
        watches = [self._add(member) for member in self.options.members]
        await asyncio.gather(*(watch.settled.wait() for watch in watches))
        for replica in self.replicas.values():
            if replica.refused:
                raise CumuloError(_named(replica))

    async def close(self) -> None:
        for name in list(self.replicas):
            await self.remove(name)

    def end(self) -> None:
        """The gateway ends now: nothing is tried again, and whoever waits is told."""
        self.ended = True
        for replica in self.replicas.values():
            for work in list(replica.works):
                work.exchange.fail("was still answering when the gateway was told to end")
        self.note_change()

    # -- coming and going ---------------------------------------------------------------------------------
    def _add(self, member: PoolMember) -> Watch:
        replica = self.replicas[member.url] = UpstreamReplica(member, self.options)
        watch = Watch(replica, self.options, lambda: self._others(replica), self._on_change)
        self._watches[replica.name] = watch, asyncio.create_task(watch.run())
        return watch

    async def add(self, member: PoolMember) -> UpstreamReplica:
        """While serving; raises CumuloError with the reason if it cannot be a replica here."""
        if member.url in self.replicas:
            raise CumuloError(
                f"{member.url} is in the fleet already; remove it first to change its pool or weight"
            )
        watch = self._add(member)
        replica = self.replicas[member.url]
        await watch.settled.wait()
        if self.replicas.get(member.url) is not replica:
            raise CumuloError(f"{member.url} was removed while it was asked what it is")
        if replica.told is None:  # it did not say what it is, or cannot belong here
            problem = _named(replica)
            await self.remove(member.url)
            raise CumuloError(problem)
        return replica

    async def remove(self, name: str) -> None:
        """Remove a replica; the requests that run there are continued elsewhere."""
        replica = self.replicas.pop(name)
        watch, task = self._watches.pop(name)
        task.cancel()
        await asyncio.wait([task])
        watch.settled.set()
        replica.lose("was removed from the fleet")
        self._forget(replica)
        self.note_change()

    def _others(self, replica: UpstreamReplica) -> list[UpstreamReplica]:
        return [one for one in self.replicas.values() if one is not replica]

    def _on_change(self, replica: UpstreamReplica) -> None:
        if replica.trouble:
            self._forget(replica)
        self.note_change()

    def _forget(self, replica: UpstreamReplica) -> None:
        for chooser in self._choosers.values():
            chooser.forget(replica.name)

    def note_change(self) -> None:
        """Whoever waits for a change goes on: a replica came, went, recovered, drains, or does no longer."""
        self._changed.set()
        self._changed.clear()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Until a replica comes, goes, or recovers; but no longer than this."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    # -- choosing -----------------------------------------------------------------------------------------
    def models(self) -> dict[str, list[UpstreamReplica]]:
        found: dict[str, list[UpstreamReplica]] = {}
        for replica in self.replicas.values():
            for model in replica.models:
                found.setdefault(model, []).append(replica)
        return found

    def pool(self, model: str | None) -> list[UpstreamReplica]:
        """Raises UnknownModel. A request without a model goes anywhere: a server says what is wrong with it."""
        if model is None:
            return list(self.replicas.values())
        found = [replica for replica in self.replicas.values() if model in replica.models]
        if not found and any(replica.told is None for replica in self.replicas.values()):
            raise NoReplica(f"no replica that serves {model!r} has answered yet")
        if not found:
            known = ", ".join(repr(name) for name in self.models())
            raise UnknownModel(
                f"the model {model!r} is not served here; this gateway has {known or 'none now'}"
            )
        return found

    def prompt_tokens(self, model: str | None, text_bytes: int) -> int:
        """About how many tokens a prompt of so much text has."""
        return max(1, round(text_bytes * self._tokens_per_byte.get(model, _USUAL_TOKENS_PER_BYTE)))

    def learn(self, model: str | None, text_bytes: int, tokens: int) -> None:
        """A replica has counted the tokens of a prompt."""
        if text_bytes and tokens:
            known = self._tokens_per_byte.get(model, _USUAL_TOKENS_PER_BYTE)
            self._tokens_per_byte[model] = known + _LEARNING * (tokens / text_bytes - known)

    def choose(
        self,
        prompt: PromptHint,
        tried: frozenset[str] = frozenset(),
        like: str = "",
        pinned: str | None = None,
    ) -> ChosenReplica:
        """Raises NoReplica or UnknownModel. `like`: the likeness of the replica that has begun the answer.
        `pinned`: the only replica that can answer."""
        pool, now_s = self.pool(prompt.model), time.monotonic()
        if pinned is not None:
            pool = [one for one in self.replicas.values() if one.name == pinned]
        if like:
            pool = [one for one in pool if one.likeness(prompt.model) == like]
        tokens = self.prompt_tokens(prompt.model, prompt.text_bytes)
        ask = Ask(tokens, prompt.chain, prompt.session, prompt.tenant, prompt.priority, tried)
        chooser = self._choosers.get(prompt.model)
        if chooser is None:
            chooser = self._choosers[prompt.model] = Chooser(self.options.router)
        usual = usual_pace(one.pace for one in pool)
        block_tokens = self.prompt_tokens(prompt.model, TEXT_BLOCK)
        views = [replica.view(usual, now_s, block_tokens) for replica in pool]
        route = chooser.choose(ask, views, {replica.name: replica.member.weight for replica in pool})
        replica = self.replicas[route.replica]
        replica.breaker.on_sent(now_s)
        return ChosenReplica(replica, route, tokens - route.cached_tokens)


def _named(replica: UpstreamReplica) -> str:
    trouble = replica.trouble
    return trouble if trouble.startswith(replica.name) else f"{replica.name} {trouble}"


__all__ = ["ChosenReplica", "NoReplica", "PromptHint", "Replicas", "UnknownModel"]
