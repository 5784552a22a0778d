"""SloScheduling: keeps what requests are promised, as an extension of the scheduler. It does nothing until a
request has an SLO.

A request is promised its TTFT and ITL on arrival, or refused. Steps are as long as the ITL of those who decode
allows, and spend what decoding leaves on prompts, by deadline.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from cumulo.base.quantities import quantity
from cumulo.engine.decide.core import admission
from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight, PromptChunk, Prompts, StepTiming
from cumulo.engine.decide.core.request import Request, Sequence, State
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.sharing.steps import Sharing
from cumulo.engine.decide.sharing.tenants import Tenant
from cumulo.engine.decide.slo.promises import Promises
from cumulo.engine.decide.story import Promise
from cumulo.errors import Overloaded
from cumulo.spec.slo import Slo

_TTFT_MARGIN = 0.94  # of a promised TTFT, for what is not known of steps
_LEAST_SHARE = 0.05  # of a step for prompts: below, decoding alone takes all the time there is
_LONGEST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What admitting a request would mean."""

    ttft_s: float  # expected
    kept: bool  # its own promise, and those of all who wait
    ahead: int  # prompts that are computed before it
    ahead_tokens: int
    own_tokens: int  # of its prompt, that are in no cache
    why: str = ""  # not kept: in words


def look_ahead(
    batch: RequestBatch, promises: Promises, about: Iterable[Tenant], newcomer: Request, now_s: float
) -> Outlook:
    """Everybody who waits for a first token, in order of deadline, at the pace that steps leave to prompts.
    `about`: tenants that have requests, or had some a moment ago."""
    own_tokens = admission.tokens_to_compute(batch, newcomer.sequences[0])
    if not promises.cost.known:
        return Outlook(0.0, True, 0, 0, own_tokens)
    # Those who are late already come last, and nobody's promise is broken for them.
    line = sorted(
        [*promises.waiting.values(), newcomer], key=lambda one: (_deadline_s(one) < now_s, one.order)
    )
    allowance = _allowance(newcomer.tenant, about, now_s) * _TTFT_MARGIN
    found: Outlook | None = None
    own_s = ahead_tokens = 0.0
    for ahead, (one, tokens, room, took_s, clock_s) in enumerate(
        _first_tokens(batch, promises, line, own_tokens, now_s)
    ):
        left_s = _deadline_s(one) - now_s
        if one is newcomer:
            why = _own_obstacle(batch, promises, one, room)
            if not why and clock_s > left_s * allowance:
                why = f"so long it takes to compute the {tokens:,} tokens of its prompt"
                if ahead:
                    why = f"{ahead} prompts with {ahead_tokens:,.0f} tokens come first"
            own_s, found = took_s, Outlook(clock_s, not why, ahead, int(ahead_tokens), own_tokens, why)
            if why:
                break
        elif found is not None and clock_s - own_s <= left_s < clock_s:
            return replace(found, kept=False, why="a request that is here would miss its own TTFT")
        ahead_tokens += tokens
    assert found is not None
    return found


def _first_tokens(
    batch: RequestBatch, promises: Promises, line: list[Request], own_tokens: int, now_s: float
) -> Iterator[tuple[Request, int, float, float, float]]:
    """For each in line: prompt tokens to compute, the share of a step that is left to prompts then, how long its
    prompt takes at that pace, and when its first token comes, in seconds from now. `own_tokens`: the
    newcomer's."""
    cost, most = promises.cost, batch.config.max_tokens_per_step
    rows, context = promises.rows, promises.context
    clock_s = promises.in_flight_s(now_s) + promises.step_s  # a first token comes at the end of a step
    for one in line:
        tokens = promises.tokens_left(one, own_tokens)
        start = one.prompt_length - tokens
        share = promises.prompt_share(rows, context, start, most)
        took_s = cost.prompt_s(start, tokens) / (share or _LEAST_SHARE)
        clock_s += took_s
        yield one, tokens, promises.prompt_room(rows, context), took_s, clock_s
        rows, context = rows + 1, context + one.prompt_length


def refuse(outlook: Outlook, promised_ttft_s: float | None) -> Overloaded:
    late_s = outlook.ttft_s - (promised_ttft_s or 0.0)
    retry_s = min(_LONGEST_RETRY_S, max(1.0, late_s)) if late_s < inf else _LONGEST_RETRY_S
    expected = f"the first token is expected after {quantity(outlook.ttft_s, 's')}"
    promised = f", and {quantity(promised_ttft_s, 's')} are promised" if promised_ttft_s is not None else ""
    return Overloaded(
        f"{expected}{promised}: {outlook.why}; try again in {retry_s:.0f} s, or ask for more time with "
        'slo: {"ttft_ms": ..., "itl_ms": ...}',
        retry_s,
    )


def _own_obstacle(batch: RequestBatch, promises: Promises, request: Request, room: float) -> str:
    """Why it could not run in time however short its wait is."""
    if room < _LEAST_SHARE:
        return f"{promises.rows} sequences that are being answered leave no time for prompts within their ITL"
    promise = request.story.promise
    if promise is not None and promise.itl_s is not None:
        alone_s = promises.cost.decode_s(promises.rows + 1, promises.context + request.prompt_length)
        # It must leave time for the prompts of others, or it would keep everybody else out.
        if alone_s > (1 - _LEAST_SHARE) * promises.step_within(promise.itl_s):
            return (
                f"its next token would take {quantity(alone_s, 's')} without any prompts, and its ITL is "
                f"{quantity(promise.itl_s, 's')}"
            )
    pool, waiting = batch.pool, [one for one in promises.waiting.values() if _is_queued(one)]
    slots = len(batch.kv.free_slots) - sum(one.params.samples for one in waiting)
    if slots < request.params.samples:
        return f"all {batch.config.max_running} sequences that can run at a time are taken"
    size = pool.block_size
    growing = len(batch.running) * promises.output_tokens / 2 / size
    wanted = sum(-(-one.prompt_length // size) for one in (*waiting, request))
    if waiting and wanted + growing > pool.free_count:
        return (
            f"it and {len(waiting)} that wait need {wanted} KV blocks for their prompts, answers that have begun "
            f"need {growing:.0f} more, and {pool.free_count} of {pool.blocks} are free"
        )
    return ""


def _is_queued(request: Request) -> bool:
    return request.sequences[0].state == State.WAITING


def _deadline_s(request: Request) -> float:
    promise = request.story.promise
    return inf if promise is None or promise.ttft_s is None else request.arrived_s + promise.ttft_s


def _allowance(tenant: str, about: Iterable[Tenant], now_s: float) -> float:
    """How much of its TTFT a tenant may let its own requests queue. One that has had more than its share of the
    last seconds leaves room to the others; alone, it has all."""
    served = {one.name: one.recent(now_s) for one in about}
    total = sum(served.values())
    if len(served) < 2 or total <= 0:
        return 1.0
    return min(1.0, total / len(served) / max(served.get(tenant, 0.0), 1e-9))


class SloScheduling(Extension):
    def __init__(self, batch: RequestBatch, sharing: Sharing) -> None:
        self._batch, self._sharing = batch, sharing
        self.promises: Promises | None = None  # from the first request on that has an SLO

    def forget(self) -> None:
        """Nothing is known of steps and nobody is promised anything, as at the beginning."""
        self.promises = None
        self._batch.kv.costs.forget()
        self._batch.longest_step_s = float("inf")

    # -- arrival ----------------------------------------------------------------------------------------------
    def arrive(self, request: Request) -> None:
        """Promise the request what it asks for or what is usual here. Raises Overloaded where that cannot be
        kept."""
        config, now_s = self._batch.config, request.arrived_s
        if self.promises is None:
            if request.slo is None and config.slo is None:
                return
            self.promises = Promises(config.slo, self._batch.kv.costs)
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
