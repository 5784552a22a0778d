"""Which prompts a step computes, and how many tokens of each, in an engine with an SLO: by deadline, for as long as
the ITL of those who decode leaves time. Asked by the scheduler.
"""

from cumulo.engine.decide import admission
from cumulo.engine.decide.books import Books
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.request import Sequence
from cumulo.engine.decide.slo.promises import Promises


def promised_prompts(
    books: Books, promises: Promises, chunks: list[Sequence], budget: int, may_admit: bool, plan: StepPlan,
    now_s: float,
) -> list[tuple[Sequence, int, bool]]:  # fmt: skip
    """Sequences with their tokens in this step."""
    left = budget
    given: list[tuple[Sequence, int, bool]] = []
    seated = sorted(chunks, key=lambda one: _turn(one, now_s), reverse=True)
    while left > 0 and not promises.step_full:
        first = books.queue.first() if may_admit else None
        if first is not None and (not seated or _turn(first, now_s) < _turn(seated[-1], now_s)):
            sequence = admission.admit_next(books, plan, now_s)
            if sequence is None:
                may_admit = False
                continue
        elif seated:
            sequence = seated.pop()
        else:
            break
        count = promises.spend(sequence, min(sequence.to_compute, left), not given)
        given.append((sequence, count, False))
        left -= count
    return given


def _turn(sequence: Sequence, now_s: float) -> tuple[bool, tuple[float, int]]:
    """By deadline; who has missed it already comes after those who have not."""
    request = sequence.request
    promise = request.story.promise
    late = (
        promise is not None
        and promise.ttft_s is not None
        and request.story.first_token_s is None
        and request.arrived_s + promise.ttft_s < now_s
    )
    return late, request.order
