"""StepMeter: stands between the engine and its runner and notes what each step contained. Used by the engine
process; the records go to /metrics and the console.
"""

from collections import Counter

from cumulo.engine.decide.core.block_pool import BlockHash
from cumulo.engine.decide.plan import PendingStep, Runner, StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.serve.engine_link.messages import RoutingNews, StepRecord, Submit


class StepMeter:
    """A Runner that hands everything on."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps = 0
        self.records: list[StepRecord] = []  # the reader empties it

    def submit(self, plan: StepPlan) -> PendingStep:
        return _MeteredStep(self, plan, self._runner.submit(plan))

    def close(self) -> None:
        self._runner.close()

    def note(self, plan: StepPlan, started_s: float, finished_s: float) -> None:
        self.steps += 1
        decodes, pairs = plan.counts.count(1), 0
        if decodes < len(plan.counts):
            for start, count in zip(plan.starts, plan.counts, strict=True):
                pairs += count * start + count * (count + 1) // 2 if count > 1 else 0
        self.records.append(
            StepRecord(
                plan.index,
                started_s,
                finished_s,
                plan.tokens - decodes,
                decodes,
                len(plan.draw_slots),
                pairs,
            )
        )


class _MeteredStep:
    def __init__(self, meter: StepMeter, plan: StepPlan, pending: PendingStep) -> None:
        self._meter, self._plan, self._pending = meter, plan, pending

    def result(self) -> StepResult:
        result = self._pending.result()
        self._meter.note(self._plan, result.started_s, result.finished_s)
        return result


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
