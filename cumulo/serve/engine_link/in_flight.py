"""A request on its way through an engine: its inbox, what its client has, and where it was sent. Shared by
EngineClient, Fleet and whoever reads the answers.
"""

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from cumulo.engine.decide.core.request import DrawnSample
from cumulo.engine.decide.routing import Route
from cumulo.engine.outputs import Delta
from cumulo.serve.engine_link.messages import Failure, Finished, Stats, Submit

News = Delta | Finished | Failure


class Inbox:
    """Where the answers to one or several requests arrive; each is told apart by its position."""

    def __init__(self) -> None:
        self._items: list[tuple[int, News]] = []
        self._taker: asyncio.Future[None] | None = None

    def put(self, position: int, news: News) -> None:
        self._items.append((position, news))
        if self._taker is not None:
            if not self._taker.done():  # its task may have been cancelled
                self._taker.set_result(None)
            self._taker = None

    async def next_items(self) -> list[tuple[int, News]]:
        """Everything that has come since the last time; waits until there is something."""
        while not self._items:
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        items, self._items = self._items, []
        return items


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One time that a request was given to a replica."""

    time_s: float
    route: Route
    moved_because: str = ""  # what happened to the replica it was with before; empty: it was with none


@dataclass(slots=True)
class InFlight:
    submit: Submit
    inbox: Inbox
    position: int
    streamed: "array[int]" = field(default_factory=lambda: array("i"))  # output tokens its client has
    last_token_s: float | None = None
    resubmitted_at: int = -1  # output tokens it had when it was submitted again; -1: it never was
    dispatches: list[Dispatch] = field(default_factory=list)  # where there are several replicas
    samples: dict[int, DrawnSample] | None = None  # what is streamed of each, where there are several

    def __post_init__(self) -> None:
        if self.submit.stream and self.submit.params.n > 1 and self.submit.params.can_resume:
            self.samples = {}

    def note(self, delta: Delta) -> None:
        """Its client has this, too."""
        self.streamed.extend(delta.token_ids)
        if self.samples is not None:
            before = self.samples.get(delta.index, DrawnSample(array("i")))
            before.tokens.extend(delta.token_ids)
            self.samples[delta.index] = DrawnSample(before.tokens, delta.finish_reason)

    @property
    def can_go_on(self) -> bool:
        """Whether another engine can continue it with what its client has."""
        return not self.streamed or self.submit.params.can_resume

    def as_it_is_now(self, expects_cached: int = 0) -> Submit:
        """What an engine is sent that takes it over."""
        if not self.streamed and not expects_cached:
            return self.submit
        drawn = sorted((self.samples or {}).items())
        return msgspec.structs.replace(
            self.submit,
            resumed=self.resumed,
            resumed_samples=[(one.tokens.tobytes(), one.finish_reason) for _, one in drawn],
            expects_cached=expects_cached,
        )

    @property
    def resumed(self) -> bytes:
        """The output tokens that its client has, for the engine that continues; one that tells all at the end
        begins anew."""
        return self.streamed.tobytes() if self.submit.stream and self.samples is None else b""


class Observer(Protocol):
    """Who is told what passes: metrics, stories, limits."""

    def on_progress(self, stats: Stats) -> None: ...
    def on_delta(self, request: InFlight, delta: Delta, now_s: float) -> None: ...
    def on_end(self, request: InFlight, end: Finished | Failure) -> None: ...
