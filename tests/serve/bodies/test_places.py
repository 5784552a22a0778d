"""Places for large bodies: bounded in all and per caller, given to callers in turn, never lost."""

import asyncio
import contextlib
from typing import Any

import pytest

from cumulo.serve.bodies.reader import FairPlaces
from cumulo.serve.errors import ApiError


class Line:
    """Callers that stay in their place until they are told to leave."""

    def __init__(self, places: FairPlaces) -> None:
        self._places = places
        self.inside: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}

    def come(self, name: str) -> "asyncio.Task[None]":
        self._leave[name] = asyncio.Event()

        async def stay() -> None:
            async with self._places.place(name[0]):
                self.inside.append(name)
                await self._leave[name].wait()
                self.inside.remove(name)

        return asyncio.create_task(stay())

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_free_places_go_to_the_callers_in_turn() -> None:
    async def play() -> None:
        line = Line(FairPlaces(1, 1, 60))
        tasks = [line.come(name) for name in ("a1", "a2", "a3", "b1")]
        await settle()
        order = []
        for _ in tasks:
            order += line.inside
            await line.leave(line.inside[0])
        assert order == ["a1", "b1", "a2", "a3"]  # b does not wait for all of a's
        await asyncio.gather(*tasks)

    asyncio.run(play())


def test_one_caller_leaves_places_to_others() -> None:
    async def play() -> None:
        line = Line(FairPlaces(3, 2, 60))
        tasks = [line.come(name) for name in ("a1", "a2", "a3", "b1")]
        await settle()
        assert line.inside == ["a1", "a2", "b1"]
        await line.leave("b1")
        assert line.inside == ["a1", "a2"]
        await line.leave("a1")
        assert line.inside == ["a2", "a3"]
        for name in ("a2", "a3"):
            await line.leave(name)
        await asyncio.gather(*tasks)

    asyncio.run(play())


def test_who_waits_too_long_is_told_when_to_come_again() -> None:
    async def play() -> ApiError:
        places = FairPlaces(1, 1, 0.01)
        async with places.place("a"):
            with pytest.raises(ApiError) as caught:
                async with places.place("b"):
                    pass
        async with places.place("b"):  # and the place is free again
            return caught.value

    error = asyncio.run(play())
    assert (error.status, error.code) == (503, "too_many_large_bodies") and "Retry-After" in error.headers


def test_a_cancelled_wait_takes_no_place() -> None:
    async def play() -> None:
        line = Line(FairPlaces(1, 1, 60))
        first, second, third = (line.come(name) for name in ("a1", "a2", "b1"))
        await settle()
        second.cancel()
        line._leave["a1"].set()
        third.cancel()  # in the same turn as it is given its place, or before
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(first, second, third)
        last: Any = line.come("c1")
        await settle()
        assert line.inside == ["c1"]
        await line.leave("c1")
        await last

    asyncio.run(play())
