"""SloScheduling: keeps what requests are promised, as an extension of the scheduler. It does nothing until a
request has an SLO.

A request is promised its TTFT and ITL on arrival, or refused. Steps are as long as the ITL of those who decode
allows, and spend what decoding leaves on prompts, by deadline.
"""

from cumulo.engine.decide.core import admission
from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight, PromptChunk, Prompts, StepTiming
from cumulo.engine.decide.core.request import Request, Sequence
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.sharing.steps import Sharing
from cumulo.engine.decide.slo.outlook import look_ahead, refuse
from cumulo.engine.decide.slo.promises import Promises
from cumulo.engine.decide.story import Promise
from cumulo.spec.slo import Slo


class SloScheduling(Extension):
    def __init__(self, batch: RequestBatch, sharing: Sharing) -> None:
        self._batch, self._sharing = batch, sharing
        self.promises: Promises | None = None  # from the first request on that has an SLO

    def forget(self) -> None:
        """Nothing is known of steps and nobody is promised anything, as at the beginning."""
        self.promises = None
        self._batch.longest_step_s = float("inf")

    # -- arrival ----------------------------------------------------------------------------------------------
    def arrive(self, request: Request) -> None:
        """Promise the request what it asks for or what is usual here. Raises Overloaded where that cannot be
        kept."""
        config, now_s = self._batch.config, request.arrived_s
        if self.promises is None:
            if request.slo is None and config.slo is None:
                return
            self.promises = Promises(config.slo)
            # Promises are kept by deadline, whoever has been served more or less.
            self._sharing.queue.by_order, self._sharing.bounds_steps = True, False
        promises, story = self.promises, request.story
        # One that is less important than usual is promised only what it asks for: batches wait until there is time.
        usual = config.slo if request.priority <= 0 else None
        slo = usual if request.slo is None else request.slo.with_rest_of(usual)
        tokens = request.prompt_length
        begun = request.sequences[0].output_length > 0  # another engine let it in
        if slo is not None and not request.prefill_only and not begun:
            story.promise = Promise.from_slo(slo)
            # By deadline. Without a promise it is as if one priority lower.
            ttft_s = slo.ttft_s if slo.ttft_s is not None else config.priority_step_s
            order, number = request.order
            request.order = (order + ttft_s, number)
            outlook = look_ahead(self._batch, promises, self._sharing.shares.about(), request, now_s)
            tokens = outlook.own_tokens
            if outlook.kept:
                expected_ms = 1e3 * outlook.ttft_s
                story.add(
                    now_s, "promised", promise=_words(slo), expected_ms=expected_ms, ahead=outlook.ahead
                )
            elif config.slo_late == "refuse":
                promises.refused += 1
                raise refuse(outlook, slo.ttft_s)
            else:
                story.promise = None
                request.order = (order + config.priority_step_s, number)
                story.add(now_s, "not_promised", why=outlook.why)
        elif not begun:
            request.order = (request.order[0] + config.priority_step_s, request.order[1])
        promises.add(request, tokens)

    def request_ended(self, request: Request, now_s: float) -> None:
        if self.promises is not None:
            self.promises.drop(request)
        promise, ttft_s = request.story.promise, request.story.ttft_s
        if promise is not None and ttft_s is not None:
            request.story.add(
                now_s, promise.outcome(ttft_s), ttft_ms=1e3 * ttft_s, worst_itl_ms=1e3 * promise.worst_itl_s,
                late=promise.late_tokens, tokens=promise.tokens,
            )  # fmt: skip

    # -- a step -----------------------------------------------------------------------------------------------
    def share_prompts(
        self, waiting: list[Sequence], budget: int, may_admit: bool, plan: StepPlan, now_s: float
    ) -> Prompts | None:
        """By deadline, for as long as the ITL of those who decode leaves time."""
        promises, batch = self.promises, self._batch
        if promises is None:
            return None
        promises.begin_step(plan)
        batch.longest_step_s = promises.step_s
        left = budget
        given: list[PromptChunk] = []
        seated = sorted(waiting, key=lambda one: _turn(one, now_s), reverse=True)
        while left > 0 and not promises.step_full:
            first = batch.queue.first() if may_admit else None
            if first is not None and (not seated or _turn(first, now_s) < _turn(seated[-1], now_s)):
                sequence = admission.admit(batch, first, plan, now_s)
                if sequence is None:
                    may_admit = False
                    continue
            elif seated:
                sequence = seated.pop()
            else:
                break
            count = promises.spend(sequence, min(sequence.to_compute, left), not given)
            given.append(PromptChunk(sequence, count))
            left -= count
        return Prompts(given, full=promises.step_full)

    def bound_tokens(self, plan: StepPlan, tokens: int) -> int:
        return tokens if self.promises is None else min(tokens, self.promises.draft_room())

    def end_step(self, plan: StepPlan, flight: Flight, now_s: float) -> None:
        if self.promises is not None and flight.rows:
            self.promises.planned(plan, now_s)

    def observe(self, plan: StepPlan, timing: StepTiming, now_s: float) -> None:
        if self.promises is not None:
            self.promises.observe(plan, self._batch.in_flight[plan.index].draws, now_s)


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


def _words(slo: Slo) -> str:
    return " and ".join(f"{name.upper()} {1e3 * bound:.0f} ms" for name, bound in slo.bounds.items())
