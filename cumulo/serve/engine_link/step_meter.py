"""StepMeter notes what each step of the engine contained, for /metrics and the console; RoutingReporter tells the
router of a fleet what it needs to know. Both are used by the engine process.
"""

from collections import Counter

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.serve.engine_link.messages import RoutingNews, StepRecord, Submit


class StepMeter:
    def __init__(self) -> None:
        self.steps = 0
        self.records: list[StepRecord] = []  # the reader empties it

    def note(self, plan: StepPlan, result: StepResult) -> None:
        self.steps += 1
        decodes, pairs = plan.counts.count(1), 0
        if decodes < len(plan.counts):
            for start, count in zip(plan.starts, plan.counts, strict=True):
                pairs += count * start + count * (count + 1) // 2 if count > 1 else 0
        self.records.append(
            StepRecord(
                plan.index,
                result.started_s,
                result.finished_s,
                plan.tokens - decodes,
                decodes,
                len(plan.draw_slots),
                pairs,
            )
        )


class RoutingReporter:
    """What an engine process tells the router of its fleet. Read by the engine loop at every report."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._expected: dict[str, int] = {}  # by request: tokens that the router expects in the prefix cache
        # Whatever is cached already is news, too: nobody has been told.
        scheduler.pool.news = dict.fromkeys(scheduler.pool.block_of, True)

    def expect(self, submit: Submit) -> None:
        if submit.expects_cached:
            self._expected[submit.request_id] = submit.expects_cached

    def take_news(self) -> RoutingNews:
        scheduler, expected = self._scheduler, self._expected
        queues: Counter[tuple[int, str]] = Counter()
        for request in scheduler.requests.values():
            computed = max(one.computed for one in request.sequences)
            if computed < request.prompt_length:
                left = request.prompt_length - max(computed, expected.get(request.id, 0))
                queues[request.priority, request.tenant] += max(0, left)
        if len(expected) > 2 * len(scheduler.requests) + 64:
            self._expected = {name: expected[name] for name in scheduler.requests if name in expected}
        came: list[BlockHash] = []
        went: list[BlockHash] = []
        for block_hash, is_here in (scheduler.pool.news or {}).items():
            (came if is_here else went).append(block_hash)
        scheduler.pool.news = {}
        return RoutingNews(
            len(scheduler.requests),
            [(priority, tenant, tokens) for (priority, tenant), tokens in queues.items()],
            scheduler.costs.prompt_s_per_token,
            b"".join(came),
            b"".join(went),
        )
