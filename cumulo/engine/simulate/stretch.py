"""Stretches in which everybody decodes: plans that repeat are timed by a line instead of one by one. Called by
`simulate` only.

How often a plan repeats is decided by the engine's `Lockstep`; here the steps take their time, and tokens arrive. A
stretch ends where a decision is due or a request arrives. That the outcome is the same, to the last bit, is tested
against asking the scheduler at every step.
"""

from collections.abc import Mapping

from cumulo.engine.decide.lockstep import Lockstep
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.simulate.results import close_ended, enter_result, note_settled
from cumulo.engine.simulate.run import Run, StepCost, StepInFlight, StepTime


def play_stretch(
    scheduler: Scheduler,
    lockstep: Lockstep,
    cost: StepCost,
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
