"""SLOs: what requests are promised, whether that can be kept, and how steps keep it. An extension of the scheduler
that does nothing until a request has an SLO.

A request is promised its TTFT and ITL on arrival, or refused. A step may take as long as the strictest ITL of those
who decode, less the error of the learned StepCost: what decoding leaves of that is spent on prompts, earliest
deadline first (Liu and Layland 1973). So a request is admitted exactly if all deadlines hold in that order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from cumulo.base.quantities import quantity
from cumulo.engine.decide.core import admission
from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight, PromptChunk, Prompts, StepTiming
from cumulo.engine.decide.core.request import Request, Sequence, State
from cumulo.engine.decide.core.step_cost import StepCost, StepMix
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.sharing.steps import Sharing
from cumulo.engine.decide.sharing.tenants import Tenant
from cumulo.engine.decide.story import Promise
from cumulo.errors import Overloaded
from cumulo.spec.slo import Slo

# Tokens of prompts that an engine computes to know its steps before it promises, the long ones only if they take no
# longer than this: long prompts cost more than their tokens say, and short ones do not show it.
_LEARNING_PROMPTS, _LONG_PROMPTS, _LONGEST_LEARNING_S = (16, 64, 128, 256), (1024, 4096, 16384), 0.5
_ITL_MARGIN = 0.96  # of the promised ITL: the host's part of a step varies, too
_STEPS_PER_TTFT = 6  # while nobody decodes a step is bounded by the TTFT that newcomers will want
_LEAST_TOKENS = 16  # of a prompt in a step, however little is left: prompts always get on
_LEARNING_TOKENS = 64  # of a step, until its cost is known
_LEARN = 0.05
_TTFT_MARGIN = 0.94  # of a promised TTFT, for what is not known of steps
_LEAST_SHARE = 0.05  # of a step for prompts: below, decoding alone takes all the time there is
_LONGEST_RETRY_S = 60.0


def learning_prompts(cost: StepCost, slo: Slo | None, max_context: int) -> Iterator[int]:
    """Lengths of prompts to compute, one after the other, before anyone is promised anything."""
    yield from (min(tokens, max_context // 2) for tokens in _LEARNING_PROMPTS)
    ttft_s = slo.ttft_s if slo is not None and slo.ttft_s is not None else inf
    for tokens in _LONG_PROMPTS:
        too_long = cost.prompt_s(0, tokens) > min(_LONGEST_LEARNING_S, ttft_s / 2)
        if tokens > max_context // 2 or not cost.known or too_long:
            return
        yield tokens


class Promises:
    """How long steps may be, and what those who wait for a first token can expect."""

    def __init__(self, batch: RequestBatch) -> None:
        self._batch, self.cost = batch, batch.kv.costs
        self.uncached: dict[
            str, int
        ] = {}  # by request: tokens of its prompt that were in no cache on arrival
        self.rows = self.context = 0  # of the last plan: who decodes
        self.output_tokens = 256.0  # of a request, on average
        self.refused = 0
        self.left_s = 0.0  # of the step that is being planned, for prompts
        self.step_full = False  # its time ended before the prompts did

    def drop(self, request: Request) -> None:
        """A request has ended."""
        self.uncached.pop(request.id, None)
        self.output_tokens += _LEARN * (request.story.output_tokens - self.output_tokens)

    @property
    def waiting(self) -> list[Request]:
        """Those who have no token yet, promised one or not."""
        return [one for one in self._batch.requests.values() if one.story.first_token_s is None]

    def tokens_left(self, request: Request, uncached: int) -> int:
        """Of its prompt, to compute; `uncached`: of one that has not been taken."""
        sequence = request.sequences[0]
        if sequence.state == State.WAITING:
            return self.uncached.get(request.id, uncached)
        return max(0, sequence.to_compute)

    @property
    def step_s(self) -> float:
        """How long a step may be expected to take."""
        default = self._batch.config.slo
        made = [one.story.promise for one in self._batch.requests.values() if one.story.promise is not None]
        bound_s = min(
            (one.itl_s for one in made if one.itl_s is not None),
            default=None if default is None else default.itl_s,
        )
        if not self.rows or bound_s is None:
            ttft_s = min((one.ttft_s for one in made if one.ttft_s is not None), default=1.0)
            bound_s = max(bound_s or 0.0, ttft_s / _STEPS_PER_TTFT)
        return self.step_within(bound_s)

    def step_within(self, itl_s: float) -> float:
        """How long a step may be expected to take that is to end within an ITL."""
        return itl_s * _ITL_MARGIN / self.cost.slower

    def begin_step(self, plan: StepPlan) -> None:
        """The rows that draw one token each are planned."""
        self.rows, self.context = len(plan.slots), sum(plan.starts)
        self._batch.longest_step_s = self.step_s
        self.left_s = self._batch.longest_step_s - self.cost.decode_s(self.rows, self.context)
        self.step_full = False

    def spend(self, sequence: Sequence, wanted: int, first: bool) -> int:
        """How many tokens of a prompt this step computes; the first prompt of a step always gets on."""
        most = _LEARNING_TOKENS
        if self.cost.known:
            most = self.cost.tokens_within(self.left_s, sequence.computed)
            most = max(_LEAST_TOKENS, most) if first else most
        count = min(wanted, most)
        self.left_s -= self.cost.prompt_s(sequence.computed, count)
        self.step_full = count < wanted or (self.cost.known and self.left_s <= 0)
        return count

    def draft_room(self) -> int:
        """Drafted tokens for which the step has time, next to the rows and prompts that are planned."""
        if not self.rows or not self.cost.known:
            return 0
        return self.cost.tokens_within(self.left_s, self.context // self.rows)

    def in_flight_s(self, now_s: float) -> float:
        """The seconds until all planned steps are done."""
        flights = self._batch.in_flight.values()
        expected_s = sum(one.expected_s for one in flights)
        began_s = min((one.planned_s for one in flights), default=now_s)
        return max(0.0, expected_s - (now_s - max(began_s, self._batch.last_result_s)))


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
    line = sorted([*promises.waiting, newcomer], key=lambda one: (_deadline_s(one) < now_s, one.order))
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
    step_s = promises.step_s
    clock_s = promises.in_flight_s(now_s) + step_s  # a first token comes at the end of a step
    for one in line:
        tokens = promises.tokens_left(one, own_tokens)
        start = one.prompt_length - tokens
        # What decoding leaves of a step is spent on prompts, as far as they fill it.
        decode_s = cost.decode_s(rows, context)
        prompts_s = min(step_s - decode_s, cost.prompt_s(start, max(1, most - rows)))
        share = prompts_s / (decode_s + prompts_s) if prompts_s > 0 else _LEAST_SHARE
        took_s = cost.prompt_s(start, tokens) / share
        clock_s += took_s
        yield one, tokens, 1 - decode_s / step_s, took_s, clock_s
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
    pool, waiting = batch.pool, [one for one in promises.waiting if one.sequences[0].state == State.WAITING]
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
            self.promises = Promises(self._batch)
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
        promises.uncached[request.id] = tokens

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
            flight.expected_s = self.promises.cost.seconds(StepMix.from_plan(plan))

    def observe(self, plan: StepPlan, timing: StepTiming, now_s: float) -> None:
        for sequence in self._batch.in_flight[plan.index].draws if self.promises is not None else ():
            promise = sequence.request.story.promise
            if promise is not None and sequence.sample_index == 0 and sequence.state != State.FINISHED:
                promise.note_token(now_s)


def _turn(sequence: Sequence, now_s: float) -> tuple[bool, tuple[float, int]]:
    """By deadline; who has missed it already comes after those who have not."""
    request = sequence.request
    return request.story.first_token_s is None and _deadline_s(request) < now_s, request.order


def _words(slo: Slo) -> str:
    return " and ".join(f"{name.upper()} {1e3 * bound:.0f} ms" for name, bound in slo.bounds.items())
