"""What a rehearsed fleet asks of a replica, and the exact one: the engine's own loop in virtual time. The rough one
is in autoscale_sketch.py.
"""

from typing import NamedTuple, Protocol

from cumulo.engine.decide.routing import ReplicaView
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.fleet import Placed, replica_view
from cumulo.engine.simulate.run import Arrival, Served


class MemberLoad(NamedTuple):
    """Of one replica, now."""

    waiting: int  # requests without a first token
    waiting_tokens: int  # of their prompts, not computed yet
    running: int
    busy_s: float  # of its device, since it began


class PlayedReplica(Protocol):
    @property
    def clock_s(self) -> float: ...
    @property
    def requests(self) -> int:
        """That it has taken and not answered."""
        ...

    @property
    def prompt_s_per_token(self) -> float: ...
    def begin(self, ready_s: float) -> None:
        """It serves from now on."""
        ...

    def advance(self, until_s: float) -> None: ...
    def give(self, arrival: Arrival, cached_tokens: int) -> None:
        """A request, at a time up to which it was advanced."""
        ...

    def view(self, name: str, prompt_s_per_token: float) -> ReplicaView: ...
    def over(self) -> list[Served]:
        """Requests that ended since the last time."""
        ...

    def load(self) -> MemberLoad: ...


class EngineMember:
    """Scheduler and block pool are the real ones."""

    def __init__(self, engine: SimulatedEngine, itl_bound_s: float | None = None) -> None:
        self._engine, self._placed = engine, Placed(engine)
        engine.run.itl_bound_s = itl_bound_s
        self._judged = (
            0  # of its requests, in the order in which it took them: those before this one are noted
        )
        self._open: list[Served] = []

    @property
    def clock_s(self) -> float:
        return self._engine.clock_s

    @property
    def requests(self) -> int:
        return len(self._engine.scheduler.requests) + len(self._engine.waiting_arrivals())

    @property
    def prompt_s_per_token(self) -> float:
        return self._engine.scheduler.costs.prompt_s_per_token

    def begin(self, ready_s: float) -> None:
        self._engine.clock_s = max(self._engine.clock_s, ready_s)

    def advance(self, until_s: float) -> None:
        self._engine.advance(until_s)

    def give(self, arrival: Arrival, cached_tokens: int) -> None:
        self._engine.arrivals.append(arrival)
        self._placed.cached_tokens.append(cached_tokens)

    def view(self, name: str, prompt_s_per_token: float) -> ReplicaView:
        return replica_view(name, self._placed, prompt_s_per_token)

    def over(self) -> list[Served]:
        served = self._engine.run.served
        self._open += served[self._judged :]
        self._judged = len(served)
        over = [one for one in self._open if one.finished or one.refused is not None]
        if over:
            self._open = [one for one in self._open if not (one.finished or one.refused is not None)]
        return over

    def load(self) -> MemberLoad:
        coming = self._engine.waiting_arrivals()
        begun = sum(one.first_token_s is not None for one in self._open)
        tokens = sum(one.prompt_tokens for one in coming if one.first_token_s is None) + sum(
            max(0, request.prompt_length - request.sequences[0].computed)
            for request in self._engine.scheduler.requests.values()
        )
        waiting = len(self._open) - begun + len(coming)
        return MemberLoad(waiting, tokens, begun, self._engine.run.device_busy_s)
