"""Results of simulated steps: when each request's tokens came, and what became of requests that ended. Kept by
`simulate`, step by step and in stretches.
"""

from collections.abc import Mapping

from cumulo.engine.decide.core.extension import StepTiming
from cumulo.engine.decide.core.request import Sequence
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.simulate.drafts import SimulatedHead, drafted_result
from cumulo.engine.simulate.lockstep import Lockstep
from cumulo.engine.simulate.run import Run, Served, StepClock, StepInFlight, StepTime


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


def play_stretch(
    scheduler: Scheduler,
    lockstep: Lockstep,
    cost: StepClock,
    run: Run,
    in_flight: StepInFlight,
    shared: Mapping[int, int],
    clock_s: float,
    until_s: float,
) -> tuple[float, StepInFlight] | None:
    """Play on from the step in flight until `until_s` or a decision; returns the clock and the last step, which is
    then in flight. None where somebody does more than decode, or nothing can be played."""
    joined = lockstep.join(shared)
    note_settled(lockstep, run)
    if not joined:
        return None
    rows = asked_rows = asked_steps = 0
    before_s, started = 0.0, False
    done_s, last_apply_s = in_flight.done_s, in_flight.time.apply_s
    device_free_s = done_s
    add_itl, add_count = run.itl_s.append, run.itl_counts.append
    busy_s = read_tokens = 0.0
    while (not started or clock_s < until_s) and (repeat := lockstep.plan()) is not None:
        in_last, (index, steps, rows, context_tokens, shared_tokens) = rows, repeat
        if rows != asked_rows:
            if (time := cost.decode(rows)) is None:
                break
            run.count_stretch(asked_rows, asked_steps)
            asked_rows, asked_steps = rows, 0
            submit_s, fixed_s, token_s, saving, apply_s = time
        saved_tokens = shared_tokens * saving
        for played in range(1, steps + 1):
            clock_s += submit_s
            read = context_tokens - saved_tokens
            device_s = fixed_s + read * token_s
            device_free_s = (clock_s if clock_s > device_free_s else device_free_s) + device_s
            busy_s += device_s
            read_tokens += read
            if done_s > clock_s:
                clock_s = done_s
            if not started:
                enter_result(in_flight, clock_s, scheduler, lockstep, run)
                started = True
            else:
                add_itl(clock_s - before_s)
                add_count(in_last if played == 1 else rows)
                if played == 1:
                    run.most_blocks = max(run.most_blocks, scheduler.pool.used_count)
                    lockstep.apply(index - 1, clock_s)
                    close_ended(scheduler, clock_s, run)
            before_s = clock_s
            clock_s += last_apply_s
            done_s, last_apply_s = device_free_s, apply_s
            context_tokens += rows
            if clock_s >= until_s:
                break
        lockstep.advance(played)
        asked_steps += played
    if not started:
        return None
    run.count_stretch(asked_rows, asked_steps)
    run.device_busy_s += busy_s
    run.stretch_read += read_tokens
    run.last_result_s = before_s
    return clock_s, StepInFlight(lockstep.last_plan(), StepTime(submit_s, device_s, last_apply_s), done_s)
