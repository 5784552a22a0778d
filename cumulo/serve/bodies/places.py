"""FairPlaces: a few places for large bodies, shared among callers. Used by BodyReader.

A caller who sends many large bodies at once has its own wait behind each other. Free places go to the callers in
turn, so another caller's first body waits for a place, not for the whole line.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from cumulo.serve.errors import ApiError


class FairPlaces:
    """`places` in all, and `places_each` for one caller; who waits longer than `patience_s` gets a 503."""

    def __init__(self, places: int, places_each: int, patience_s: float) -> None:
        self._free, self._each, self._patience_s = places, places_each, patience_s
        self._taken: Counter[str] = Counter()
        self._waiting: dict[
            str, deque[asyncio.Future[None]]
        ] = {}  # the caller whose turn is next comes first

    @contextlib.asynccontextmanager
    async def place(self, caller: str) -> AsyncIterator[None]:
        await self._enter(caller)
        try:
            yield
        finally:
            self._leave(caller)

    async def _enter(self, caller: str) -> None:
        if self._free and self._taken[caller] < self._each and caller not in self._waiting:
            self._take(caller)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await asyncio.wait_for(asyncio.shield(turn), self._patience_s)
        except TimeoutError:
            if turn.done():  # it came at the last moment
                return
            self._give_up(caller, turn)
            raise ApiError(
                503,
                "too many large request bodies are being read at the moment: try again soon, with fewer at a time",
                code="too_many_large_bodies",
                retry_after_s=2,
            ) from None
        except BaseException:
            if turn.done():
                self._leave(caller)
            else:
                self._give_up(caller, turn)
            raise

    def _take(self, caller: str) -> None:
        self._free -= 1
        self._taken[caller] += 1

    def _leave(self, caller: str) -> None:
        self._free += 1
        self._taken[caller] -= 1
        if not self._taken[caller]:
            del self._taken[caller]
        for other in list(self._waiting):
            if not self._free:
                return
            if self._taken[other] < self._each:
                turns = self._waiting.pop(other)
                turns.popleft().set_result(None)
                self._take(other)
                if turns:
                    self._waiting[other] = turns  # behind the others

    def _give_up(self, caller: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[caller]
        turns.remove(turn)
        if not turns:
            del self._waiting[caller]
