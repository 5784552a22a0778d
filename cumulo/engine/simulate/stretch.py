"""Stretches in which everybody decodes, played at once instead of step by step. Called by `simulate` only.

While nobody waits and all who run are in lockstep, the scheduler has nothing to decide: each plan is the last one,
one token further. What changes on the way is done as the scheduler and the pool do it, in the same order: blocks
are given when a sequence fills its last one, filled blocks become findable, sequences end. A stretch ends where a
decision is due: a request arrives, the free blocks run out, or all have drawn their last token. That the outcome is
the same, to the last bit, is tested against asking the scheduler at every step.
"""

from collections.abc import Mapping

from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.simulate.lockstep import Lockstep, take_result
from cumulo.engine.simulate.run import InFlight, Run, StepCost, StepTime


def play_stretch(
    lockstep: Lockstep,
    cost: StepCost,
    run: Run,
    in_flight: InFlight,
    shared: Mapping[int, int],
    clock_s: float,
    until_s: float,
) -> tuple[float, InFlight] | None:
    """Play on from the step in flight until `until_s` or a decision; returns the clock and the last step, which is
    then in flight. None where somebody does more than decode, or nothing can be played."""
    if not lockstep.join(shared, run.last_result_s):
        return None
    scheduler, pool, residency = lockstep.scheduler, lockstep.scheduler.pool, lockstep.scheduler.residency
    size, at_block_end, ending = scheduler.config.block_size, lockstep.at_block_end, lockstep.ending
    index = first = asked_index = scheduler.books.next_plan.index
    plan = StepPlan(index)
    rows = context_tokens = 0
    before_s, device_free_s = 0.0, in_flight.done_s
    done_s, last_apply_s = in_flight.done_s, in_flight.time.apply_s
    add_gap, add_count = run.gaps_s.append, run.gap_counts.append
    busy_s, read_tokens, asked_rows = 0.0, 0.0, -1
    while index == first or clock_s < until_s:
        in_last, news = rows, index - 1 in ending or index % size in at_block_end
        if news or index == first:
            leaving = ending.get(index - 1, ())
            rows = len(lockstep.sequences) - len(leaving)
            if rows != asked_rows:
                run.count_stretch(asked_rows, index - asked_index)
                asked_rows, asked_index, time = rows, index, cost.decode(rows) if rows else None
                if time is None:
                    break
                submit_s, fixed_s, token_s, saving, apply_s = time
            wanting = [
                sequence
                for sequence, offset, *_ in at_block_end.get(index % size, ())
                if index - offset >= sequence.capacity and index - offset + 1 < sequence.limit
            ]
            if len(wanting) > pool.free_count:
                break
            for sequence in wanting:
                residency.give_block(sequence, sequence.capacity, plan)
            offset_sum, shared_tokens = lockstep.offset_sum, lockstep.shared_tokens
            for member in leaving:
                offset_sum -= member.offset
                shared_tokens -= member.shared_tokens
            context_tokens, saved_tokens = rows * (index + 1) - offset_sum, shared_tokens * saving
        clock_s += submit_s
        read = context_tokens - saved_tokens
        device_s = fixed_s + read * token_s
        device_free_s = (clock_s if clock_s > device_free_s else device_free_s) + device_s
        busy_s += device_s
        read_tokens += read
        if done_s > clock_s:
            clock_s = done_s
        if index == first:
            take_result(in_flight, clock_s, lockstep, run)
        else:
            add_gap(clock_s - before_s)
            add_count(in_last)
            if news:
                run.most_blocks = max(run.most_blocks, pool.used_count)
                lockstep.take(index - 1, clock_s)
        before_s = clock_s
        clock_s += last_apply_s
        done_s, last_apply_s = device_free_s, apply_s
        context_tokens += rows
        index += 1
    if index == first:
        return None
    run.count_stretch(asked_rows, index - asked_index)
    run.device_busy_s += busy_s
    run.stretch_read += read_tokens
    run.last_result_s = before_s
    plan.index = index - 1
    lockstep.go_on_from(plan)
    return clock_s, InFlight(plan, StepTime(submit_s, device_s, last_apply_s), done_s)
