"""Clients that ask again when they are answered, in virtual time: the engine's loop with its real scheduler, and a
step that takes as long as on one ARM core with the built-in model."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.extension import StepTiming
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler
from tests.engine.invariants import problems

Asked = list[tuple[list[int], SamplingParams]]  # prompts that are sent together


@dataclass
class Client:
    tenant: str
    ask: Callable[[random.Random], Asked]
    pause_s: float = 0.004  # at least, before it asks again
    starts_s: float = 0.0
    only_first_token: bool = False  # then it goes, as one that measures TTFT
    stories: list[Request] = field(default_factory=list)  # that have got their first token
    unanswered: int = 0

    def ttft_s(self, share: float, since_s: float = 0.0) -> float:
        times = sorted(
            one.story.ttft_s
            for one in self.stories
            if one.arrived_s >= since_s and one.story.ttft_s is not None
        )
        return times[min(len(times) - 1, int(len(times) * share))]


def step_s(plan: StepPlan) -> float:
    single = plan.counts.count(1)
    return 6e-3 + 6e-3 * single + 5e-3 * (plan.tokens - single) + 5e-4 * len(plan.draw_rows)


def play(clients: list[Client], until_s: float, **config: Any) -> Scheduler:
    """As Engine.step: plan and submit, then finish the step before, unless the scheduler would rather wait."""
    chance, numbers = random.Random(0), itertools.count()
    scheduler = Scheduler(SchedulerConfig(**({"blocks": 4000, "max_context": 4096} | config)))
    due = [(client.starts_s, next(numbers), client) for client in clients]
    heapq.heapify(due)
    whose: dict[str, Client] = {}
    in_flight: list[tuple[StepPlan, float]] = []
    clock_s = device_free_s = 0.0
    while clock_s < until_s:
        while due and due[0][0] <= clock_s:
            arrived_s, _, client = heapq.heappop(due)
            for prompt, params in client.ask(chance):
                request = Request(
                    str(next(numbers)), prompt, params, seed=0, tenant=client.tenant, arrived_s=arrived_s
                )
                scheduler.add(request)
                whose[request.id] = client
                client.unanswered += 1
        if not scheduler.requests and not in_flight:
            clock_s = due[0][0]
            continue
        plan = None
        if not in_flight or scheduler.plans_ahead(in_flight[-1][0], clock_s):
            plan = scheduler.plan(clock_s)
        if plan is not None:
            clock_s += 2e-4
            device_free_s = max(clock_s, device_free_s) + step_s(plan)
            in_flight.append((plan, device_free_s))
        if in_flight and (plan is None or len(in_flight) > 1):
            finished, done_s = in_flight.pop(0)
            clock_s = max(clock_s, done_s)
            draws = scheduler.batch.in_flight[finished.index].draws
            scheduler.observe(finished, StepTiming(step_s(finished)), clock_s)
            scheduler.apply(finished, StepResult(tokens=[7] * len(finished.draw_rows)), clock_s)
            for request in {sequence.request.id: sequence.request for sequence in draws}.values():
                asker = whose.get(request.id)  # None: it ended while this step ran
                if asker is not None and request.story.first_token_s == clock_s:
                    asker.stories.append(request)
                    if asker.only_first_token:
                        scheduler.abort(request.id, clock_s)
            for request in scheduler.closed:
                client = whose.pop(request.id)
                client.unanswered -= 1
                if not client.unanswered:
                    pause_s = client.pause_s * (1 + chance.random())
                    heapq.heappush(due, (clock_s + pause_s, next(numbers), client))
            scheduler.closed.clear()
            clock_s += 5e-4
    assert problems(scheduler) == []
    return scheduler


def tokens(chance: random.Random, count: int) -> list[int]:
    """That no cache has."""
    return [chance.randrange(100, 40_000) for _ in range(count)]


def sampling(max_tokens: int, samples: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=samples, ignore_eos=True)
