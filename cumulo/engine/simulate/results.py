"""Results of simulated steps: when each request's tokens came, and what became of requests that ended. Kept by
`simulate`, step by step and in stretches.
"""

from cumulo.engine.decide.core.extension import StepTiming
from cumulo.engine.decide.core.request import Sequence
from cumulo.engine.decide.lockstep import Lockstep
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.simulate.drafts import SimulatedHead, drafted_result
from cumulo.engine.simulate.run import Run, Served, StepInFlight


def enter_result(
    ready: StepInFlight,
    now_s: float,
    scheduler: Scheduler,
    lockstep: Lockstep,
    run: Run,
    acceptance: float = 0.0,
    head: SimulatedHead | None = None,
) -> None:
    """A step's tokens arrive: who gained one, or several with speculation, and who has ended."""
    run.most_blocks = max(run.most_blocks, scheduler.pool.used_count)
    scheduler.observe(ready.plan, StepTiming(ready.time.device_s), now_s)
    same_s = run.last_result_s
    if scheduler.speculation is None:
        same, advanced = lockstep.enter_result(ready.plan, now_s)
    else:
        flight = scheduler.batch.in_flight[ready.plan.index]
        by_lookup = scheduler.config.speculate == "ngram"
        result = drafted_result(
            ready.plan, flight.rows, flight.draws, acceptance, by_lookup=by_lookup, head=head
        )
        same, advanced = 0, scheduler.apply(ready.plan, result, now_s)
        at_once = 0
        if ready.plan.may_accept:
            at_once = sum(count - 1 for count in scheduler.batch.gained.values())
        if at_once:  # tokens that came together with the next one
            run.itl_s.append(0.0)
            run.itl_counts.append(at_once)
    others: dict[float, int] = {}
    if run.itl_bound_s is not None:
        _judge(advanced, now_s, run.itl_bound_s)
    for sequence in advanced:
        served: Served = sequence.request.tag
        before_s = served.last_token_s
        served.last_token_s = now_s
        if before_s == same_s:
            same += 1
        elif before_s is None:
            served.first_token_s = now_s
        else:
            others[before_s] = others.get(before_s, 0) + 1
    if same:
        others[same_s] = same
    for before_s, count in others.items():
        run.itl_s.append(now_s - before_s)
        run.itl_counts.append(count)
    run.last_result_s = now_s
    close_ended(scheduler, now_s, run)


def _judge(advanced: list[Sequence], now_s: float, bound_s: float) -> None:
    """Count the tokens that came late."""
    for sequence in advanced:
        served: Served = sequence.request.tag
        if served.last_token_s is not None:
            served.tokens += 1
            served.late_tokens += now_s - served.last_token_s > bound_s


def note_settled(lockstep: Lockstep, run: Run) -> None:
    """Those who were in lockstep drew a token in every step, so also in the last one."""
    for sequence in lockstep.settled:
        sequence.request.tag.last_token_s = run.last_result_s
    lockstep.settled.clear()


def close_ended(scheduler: Scheduler, now_s: float, run: Run) -> None:
    for request in scheduler.closed:
        served, story = request.tag, request.story
        served.finished, served.last_token_s = True, now_s
        served.cached_tokens, served.preemptions = story.cached_tokens, story.preemptions
        served.recomputed_tokens, served.promised = story.recomputed_tokens, story.promise is not None
        run.drafted_tokens += story.drafted_tokens
        run.accepted_tokens += story.accepted_tokens
        request.sequences = []  # they know each other: apart, both are freed at once and not by the collector
    scheduler.closed.clear()
