"""What a rehearsed fleet asks of a replica, and the exact one: the engine's own loop in virtual time. The rough one
is in autoscale_sketch.py.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.routing import ReplicaView
from cumulo.engine.simulate.engine import SimulatedEngine
from cumulo.engine.simulate.fleet import Placed, replica_view
from cumulo.engine.simulate.run import Arrival, Served
from cumulo.plan.serve.step_cost import StepCostModel, StepLoad, pairs


class MemberLoad(NamedTuple):
    """The load of one replica at a moment."""

    waiting: int  # requests without a first token
    waiting_tokens: int  # of their prompts, not computed yet
    running: int
    busy_s: float  # of its device, since it began


class PlayedReplica(Protocol):
    @property
    def clock_s(self) -> float: ...
    @property
    def requests(self) -> int:
        """The number of requests that it has taken and not answered."""
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


_USUAL_PROMPT_S = 1e-4  # per token, before any was computed


@dataclass(slots=True)
class _Prompt:
    served: Served
    from_step: int  # the one behind the running step is planned already when a request comes
    done: int = 0  # tokens that are computed, or cached


class SketchReplica:
    """A replica played roughly and some ten times as fast as the exact one. Targets of autoscaling rules are
    searched with it; what is reported is played exactly.

    Steps are those of a scheduler that fills each with the oldest prompts, and their times are the cost model's. It
    has no block pool: keys and values are counted, prefixes are remembered as names, nobody is preempted and
    tenants do not share.
    """

    def __init__(
        self, config: SchedulerConfig, cost: StepCostModel, itl_bound_s: float | None = None
    ) -> None:
        self._cost, self._itl_bound_s = cost, itl_bound_s
        self._late_steps = 0  # that took longer than the bound on ITL, so far
        self._capacity = config.blocks * config.block_size
        self._most_running, self._budget = config.max_running, config.max_tokens_per_step
        self._clock_s = self._busy_s = 0.0
        self._queue: deque[_Prompt] = deque()
        self._running: list[tuple[int, int, Served]] = []  # a heap: the step in which it ends
        self._order = itertools.count()
        self._step = self._context = self._held = 0
        self._prompt_s = self._prompt_tokens = 0.0
        self._known: OrderedDict[int, int] = OrderedDict()  # pieces of prompts, oldest first
        self._known_tokens = self._waiting_tokens = 0
        self._over: list[Served] = []

    @property
    def clock_s(self) -> float:
        return self._clock_s

    @property
    def requests(self) -> int:
        return len(self._queue) + len(self._running)

    @property
    def prompt_s_per_token(self) -> float:
        return self._prompt_s / self._prompt_tokens if self._prompt_tokens else _USUAL_PROMPT_S

    def begin(self, ready_s: float) -> None:
        self._clock_s = max(self._clock_s, ready_s)

    def give(self, arrival: Arrival, cached_tokens: int) -> None:
        served = Served(arrival, first_token_s=arrival.first_token_s)
        self._clock_s = max(self._clock_s, arrival.arrived_s)
        if arrival.first_token_s is not None:
            self._start(served)
            return
        self._queue.append(_Prompt(served, self._step + bool(self.requests)))
        self._waiting_tokens += arrival.prompt_tokens

    def advance(self, until_s: float) -> None:
        while self._clock_s < until_s and (self._queue or self._running):
            if not self._prompt_step():
                self._decode_steps(until_s)

    def view(self, name: str, prompt_s_per_token: float) -> ReplicaView:
        decode = self._cost.decode(max(1, self.requests))
        return ReplicaView(
            name, waiting_tokens=self._waiting_tokens, running=self.requests, max_running=self._most_running,
            prompt_tok_s=1.0 / prompt_s_per_token, step_s=decode.fixed_s if decode is not None else 0.02,
        )  # fmt: skip

    def over(self) -> list[Served]:
        over, self._over = self._over, []
        return over

    def load(self) -> MemberLoad:
        return MemberLoad(len(self._queue), self._waiting_tokens, len(self._running), self._busy_s)

    # -- steps --------------------------------------------------------------------------------------------
    def _prompt_step(self) -> bool:
        """A step with as much of the oldest prompts as it has room for; False: there is none, or no room."""
        rows, budget = len(self._running), self._budget - len(self._running)
        chunk_pairs = chunk_context = chunks = tokens = 0
        done: list[_Prompt] = []
        for prompt in self._queue:
            full = tokens >= budget or rows + chunks >= self._most_running or prompt.from_step > self._step
            if full or not self._admit(prompt, bool(rows)):
                break
            length = prompt.served.arrival.prompt_tokens
            count = min(length - prompt.done, budget - tokens)
            chunk_pairs += pairs(prompt.done, count)
            chunk_context += prompt.done + count
            prompt.done += count
            tokens += count
            chunks += 1
            if prompt.done == length:
                done.append(prompt)
        if not chunks:
            return False
        self._waiting_tokens -= tokens
        load = StepLoad(
            tokens + rows, rows + chunks, rows + len(done), self._context, 0, chunk_pairs, chunk_context
        )
        step_s = sum(self._cost.parts(load))
        self._pass(step_s, 1)
        self._prompt_s += step_s
        self._prompt_tokens += tokens
        for prompt in done:
            self._queue.popleft()
            prompt.served.first_token_s = self._clock_s
            self._held -= prompt.served.arrival.prompt_tokens
            self._start(prompt.served)
        return True

    def _admit(self, prompt: _Prompt, others: bool) -> bool:
        if prompt.done:
            return True
        arrival = prompt.served.arrival
        used = self._context + self._held
        if (others or self._held) and used + arrival.prompt_tokens > self._capacity:
            return False
        prompt.done = min(self._cached(arrival), arrival.prompt_tokens - 1)
        self._waiting_tokens -= prompt.done
        self._held += arrival.prompt_tokens
        return True

    def _cached(self, arrival: Arrival) -> int:
        """Tokens of the prompt's beginning that an earlier one has left here; and its own are remembered."""
        cached, whole = 0, True
        for name, tokens in arrival.shared:
            whole = whole and name in self._known
            cached += tokens if whole else 0
            if name not in self._known:
                self._known_tokens += tokens
            self._known[name] = tokens
            self._known.move_to_end(name)
        while self._known and self._known_tokens > max(0, self._capacity - self._context - self._held):
            self._known_tokens -= self._known.popitem(last=False)[1]
        return cached

    def _start(self, served: Served) -> None:
        rest = served.arrival.output_tokens - 1
        if rest <= 0:
            served.last_token_s, served.finished = self._clock_s, True
            self._over.append(served)
            return
        served.tokens, served.late_tokens = rest, -self._late_steps  # those before it began do not count
        heapq.heappush(self._running, (self._step + rest, next(self._order), served))
        self._context += served.arrival.prompt_tokens + 1

    def _decode_steps(self, until_s: float) -> None:
        """Until somebody ends or the time is reached; contexts grow by a token per sequence and step."""
        rows = len(self._running)
        time = self._cost.decode(rows)
        steps = self._running[0][0] - self._step
        if self._queue and self._queue[0].from_step > self._step:
            steps = min(steps, self._queue[0].from_step - self._step)
        if time is None:
            one_s = sum(self._cost.parts(StepLoad(rows, rows, rows, self._context)))
            growth_s = 0.0
        else:
            one_s = max(time.fixed_s + self._context * time.context_token_s, time.submit_s + time.apply_s)
            growth_s = rows * time.context_token_s
        left_s = until_s - self._clock_s
        mean_s = one_s + growth_s * min(steps, left_s / one_s) / 2
        steps = max(1, min(steps, int(left_s / mean_s) + 1))
        self._pass(steps * one_s + growth_s * steps * (steps - 1) / 2, steps)

    def _pass(self, seconds: float, steps: int) -> None:
        self._clock_s += seconds
        self._busy_s += seconds
        self._step += steps
        if self._itl_bound_s is not None and seconds > steps * self._itl_bound_s:
            self._late_steps += steps
        self._context += steps * len(self._running)
        while self._running and self._running[0][0] <= self._step:
            served = heapq.heappop(self._running)[2]
            served.last_token_s, served.finished = self._clock_s, True
            served.late_tokens += self._late_steps
            self._context -= served.arrival.prompt_tokens + served.arrival.output_tokens
            self._over.append(served)
