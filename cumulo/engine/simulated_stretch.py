"""Stretches in which everybody decodes, played at once instead of step by step. Called by `simulate` only.

While nobody waits and every running sequence needs one token a step, the scheduler has nothing to decide: each plan
is the last one, one token further. What changes on the way is done as the scheduler and the pool do it, in the same
order: blocks are given when a sequence fills its last one, filled blocks become findable, sequences end. A stretch
ends where a decision is due: a request arrives, the free blocks run out, or all have drawn their last token. That
the outcome is the same, to the last bit, is tested against asking the scheduler at every step.
"""

from collections.abc import Iterable, Mapping

from cumulo.engine.plan import StepPlan
from cumulo.engine.request import Sequence, State
from cumulo.engine.scheduler import Scheduler, _InFlight
from cumulo.engine.simulated_run import InFlight, Run, StepCost, StepTime, close_ended, take_result


def play_stretch(
    scheduler: Scheduler,
    cost: StepCost,
    run: Run,
    in_flight: InFlight,
    shared: Mapping[int, int],
    clock_s: float,
    until_s: float,
) -> tuple[float, InFlight] | None:
    """Play on from the step in flight until `until_s` or a decision; returns the clock and the last step, which is
    then in flight. None, with nothing changed, where somebody does more than decode."""
    device_free_s = in_flight.done_s
    running = [sequence for sequence in scheduler.running if sequence.state == State.RUNNING]
    if not all(map(_only_decodes, running)):
        return None
    pool, residency, size = scheduler.pool, scheduler.residency, scheduler.config.block_size
    # By sequence: the position that step 0 of the stretch computes, and how many steps it takes part in.
    first = {sequence: sequence.computed for sequence in running}
    steps_of = {sequence: sequence.limit - sequence.computed - 1 for sequence in running}
    at_block_end: dict[int, list[Sequence]] = {}  # by the step, modulo a block's size
    for sequence, position in first.items():
        at_block_end.setdefault(-position % size, []).append(sequence)
    leaving = sorted(running, key=steps_of.__getitem__)  # stable: of those that end together, in order
    left, rows = 0, len(running)
    context_tokens = sum(first.values()) + rows
    shared_of = {sequence: shared.get(sequence.slot, 0) for sequence in running}
    shared_tokens = sum(shared_of.values())
    index, step, before_s = scheduler._next.index, 0, 0.0
    done_s, last_apply_s = in_flight.done_s, in_flight.time.apply_s
    add_gap, add_count = run.gaps_s.append, run.gap_counts.append
    busy_s, asked_rows, time = 0.0, -1, None
    while step == 0 or clock_s < until_s:
        ended = left  # from here to `left`: those that drew their last token in the step before
        while left < len(leaving) and steps_of[leaving[left]] == step:
            context_tokens -= first[leaving[left]] + step + 1
            shared_tokens -= shared_of[leaving[left]]
            rows -= 1
            left += 1
        if rows != asked_rows:
            asked_rows, time = rows, cost.decode(rows) if rows else None
            if time is None:
                break
            submit_s, fixed_s, token_s, saving, apply_s = time
        full = at_block_end.get(step % size, ())
        if full:
            wanting = [one for one in full if steps_of[one] > step and first[one] + step >= one.capacity]
            if len(wanting) > pool.free_count:
                break
            for sequence in wanting:
                residency.give_block(sequence, sequence.capacity, StepPlan(index))
        clock_s += submit_s
        read = context_tokens - shared_tokens * saving
        device_s = fixed_s + read * token_s
        device_free_s = (clock_s if clock_s > device_free_s else device_free_s) + device_s
        busy_s += device_s
        run.stretch_read += read
        run.stretch_steps[rows] += 1
        if done_s > clock_s:
            clock_s = done_s
        if step == 0:
            take_result(in_flight, clock_s, scheduler, run)
        else:
            add_gap(clock_s - before_s)
            add_count(rows + left - ended)
            if full or left > ended:
                run.most_blocks = max(run.most_blocks, pool.used_count)
                _take_tokens(scheduler, full, leaving[ended:left], step, first, steps_of, clock_s)
        before_s = clock_s
        clock_s += last_apply_s
        done_s, last_apply_s = device_free_s, apply_s
        run.computed_tokens += rows
        context_tokens += rows
        step += 1
    if step == 0:
        return None
    run.steps += step
    run.device_busy_s += busy_s
    run.most_running = max(run.most_running, len(running))
    run.last_result_s = before_s
    plan = _restore(scheduler, running, steps_of, first, index, step, before_s)
    return clock_s, InFlight(plan, StepTime(submit_s, device_s, last_apply_s), done_s)


def _only_decodes(sequence: Sequence) -> bool:
    """Its next token is being drawn, and nothing else of it is left to compute."""
    computed = sequence.computed
    return (
        sequence.pending == 1
        and computed == len(sequence.tokens)
        and computed >= sequence.prompt_length
        and not sequence.shares_tail
        and sequence.request.beam is None
    )


def _take_tokens(
    scheduler: Scheduler,
    full: Iterable[Sequence],
    ending: Iterable[Sequence],
    step: int,
    first: dict[Sequence, int],
    steps_of: dict[Sequence, int],
    now_s: float,
) -> None:
    """The result of step - 1: what it filled can be found from now on, and who drew the last token ends."""
    pool, size = scheduler.pool, scheduler.config.block_size
    if pool.prefix_cache:
        for sequence in full:
            if steps_of[sequence] >= step:
                known = first[sequence] + step
                _extend(sequence, known)
                block = known // size - 1
                pool.register(sequence.blocks[block], sequence.extend_hashes(block + 1, size)[block])
    ended = False
    for sequence in ending:
        _extend(sequence, sequence.limit)
        sequence.computed = sequence.limit - 1
        sequence.request.share.output_tokens += steps_of[sequence]
        sequence.request.tag.last_token_s = now_s
        scheduler.finish(sequence, "length", now_s)
        ended = True
    if ended:
        close_ended(scheduler)


def _extend(sequence: Sequence, known: int) -> None:
    """Tokens up to `known`: which ones is all the same."""
    tokens = sequence.tokens
    tokens.frombytes(bytes(tokens.itemsize * (known - len(tokens))))


def _restore(
    scheduler: Scheduler,
    running: list[Sequence],
    steps_of: dict[Sequence, int],
    first: dict[Sequence, int],
    index: int,
    steps: int,
    now_s: float,
) -> StepPlan:
    """Leave everything as if the scheduler had planned all of it; returns its last plan, which is in flight."""
    rows = [sequence for sequence in running if steps_of[sequence] >= steps]
    plan = StepPlan(index + steps - 1)
    last_step, later = plan.index, steps - 1
    for sequence in rows:
        known = first[sequence] + steps
        _extend(sequence, known)
        sequence.computed, sequence.pending, sequence.last_step = known, 1, last_step
        request = sequence.request
        request.share.output_tokens += later
        if later:
            request.tag.last_token_s = now_s
    plan.slots = [sequence.slot for sequence in rows]
    plan.starts = [sequence.computed - 1 for sequence in rows]
    plan.counts = [1] * len(rows)
    plan.draw_rows, plan.draw_slots = list(range(len(rows))), plan.slots
    scheduler.running = rows
    scheduler._next.index = index + steps
    scheduler._in_flight[plan.index] = _InFlight(rows, rows)
    return plan
