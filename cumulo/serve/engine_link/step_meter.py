"""StepMeter: stands between the engine and its runner and notes what each step contained. Used by the engine
process; the records go to /metrics and the console.
"""

from cumulo.engine.decide.plan import PendingStep, Runner, StepPlan, StepResult
from cumulo.serve.engine_link.messages import StepRecord


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
