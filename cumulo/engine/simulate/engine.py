"""The simulated player: the engine's loop in virtual time. Called by the planner and `cumulo simulate serve`.

The scheduler and the block pool are the real ones; a StepCost says how long the steps they plan would take. The
loop is the engine's own (engine.py): with `overlap`, step N+1 is planned and submitted while the device computes N,
so a newcomer waits for the step that runs and for the one behind it, here as there. Nothing is random: the same
arrivals and costs give the same times to the last bit.
"""

from array import array
from collections.abc import Sequence as ListLike
from functools import lru_cache

from cumulo.engine.decide.lockstep import Lockstep
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.request import Request
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.simulate.results import enter_result, note_settled
from cumulo.engine.simulate.run import Arrival, Run, Served, StepCost, StepInFlight
from cumulo.engine.simulate.stretch import play_stretch
from cumulo.errors import InvalidRequest


def simulate(
    arrivals: ListLike[Arrival],
    scheduler: Scheduler,
    cost: StepCost,
    *,
    overlap: bool = True,
    stop_s: float = float("inf"),
    step_by_step: bool = False,
) -> Run:
    """Serve all arrivals, given in order of time. Ends when the last is answered or, unfinished, at `stop_s`.

    Stretches in which everybody only decodes are played without asking the scheduler at every step, with the same
    outcome; `step_by_step` asks it.
    """
    run, lockstep = Run(), Lockstep(scheduler.books)
    clock_s = device_free_s = 0.0
    in_flight: StepInFlight | None = None
    coming, count = 0, len(arrivals)
    shared: dict[int, int] = {}
    may_stretch = overlap and not step_by_step
    while clock_s < stop_s:
        while coming < count and arrivals[coming].arrived_s <= clock_s:
            clock_s += _take_in(arrivals[coming], coming, scheduler, cost, run)
            coming += 1
        if not scheduler.requests and in_flight is None:
            if coming == count:
                break
            clock_s = max(clock_s, arrivals[coming].arrived_s)
            continue
        if may_stretch and in_flight is not None and scheduler.queue.count == 0:
            until_s = min(stop_s, arrivals[coming].arrived_s if coming < count else stop_s)
            stretched = play_stretch(scheduler, lockstep, cost, run, in_flight, shared, clock_s, until_s)
            if stretched is not None:
                clock_s, in_flight = stretched
                device_free_s = in_flight.done_s
                continue
        plan = scheduler.plan(clock_s)
        lockstep.follow(plan)
        note_settled(lockstep, run)
        submitted = None
        if plan is not None:
            _note_shared(plan, scheduler, shared)
            time = cost.time_of(plan, shared)
            clock_s += time.submit_s
            device_free_s = max(clock_s, device_free_s) + time.device_s
            submitted = StepInFlight(plan, time, device_free_s)
            run.count_step(len(plan.slots), plan.tokens, time.device_s)
        if overlap:
            ready, in_flight = in_flight, submitted
        else:
            ready = submitted
        if ready is not None:
            clock_s = max(clock_s, ready.done_s)
            enter_result(ready, clock_s, scheduler, lockstep, run)
            clock_s += ready.time.apply_s
        elif plan is None:
            raise RuntimeError(
                "the scheduler plans nothing while nothing is in flight: a bug in the scheduler"
            )
    lockstep.settle()
    note_settled(lockstep, run)
    run.ended_s = clock_s
    run.all_finished = coming == count and not scheduler.requests
    return run


def _take_in(arrival: Arrival, number: int, scheduler: Scheduler, cost: StepCost, run: Run) -> float:
    """Queue a request; returns what that costs the loop."""
    served = Served(arrival)
    run.served.append(served)
    params, prompt = _params(arrival.output_tokens), _prompt(arrival, number)
    request = Request(str(number), prompt, params, seed=0, arrived_s=arrival.arrived_s, tag=served)
    try:
        scheduler.add(request)
    except InvalidRequest as error:
        served.refused = str(error)
    else:
        if arrival.first_token_s is not None:
            _receive(request, arrival.first_token_s, scheduler)
    return cost.arrival_s(arrival.prompt_tokens)


def _receive(request: Request, first_token_s: float, scheduler: Scheduler) -> None:
    """Its keys and values lie where swapped-out blocks do, until the scheduler has room for them on the device."""
    sequence, landing = request.sequences[0], scheduler.residency.free_host_blocks
    blocks = -(-request.prompt_length // scheduler.config.block_size)
    if blocks > len(landing):
        raise RuntimeError(
            f"{blocks} blocks arrive and {len(landing)} host blocks are free: plan more of them"
        )
    sequence.host_blocks = [landing.pop() for _ in range(blocks)]
    sequence.tokens.append(0)
    sequence.computed = request.prompt_length
    request.tag.first_token_s = request.tag.last_token_s = first_token_s


@lru_cache(4096)
def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, ignore_eos=True)


def _prompt(arrival: Arrival, number: int) -> bytes:
    """Token ids that hash as the traffic shares: a piece's name over and over, then the request's own number.

    As bytes, which an array takes over at once; one by one its tokens would cost more than scheduling them.
    """
    if not arrival.shared:
        return (array("i", (number,)) * arrival.prompt_tokens).tobytes()
    tokens = array("i")
    for name, length in arrival.shared:
        tokens.extend(array("i", (-1 - name,)) * min(length, arrival.prompt_tokens - len(tokens)))
    tokens.extend(array("i", (number,)) * (arrival.prompt_tokens - len(tokens)))
    return tokens.tobytes()


def _note_shared(plan: StepPlan, scheduler: Scheduler, shared: dict[int, int]) -> None:
    """How much of its context a sequence that begins has in common with one that runs."""
    references = scheduler.pool.references
    for new in plan.begin:
        held = sum(references[block] > 1 for block in new.blocks) if references[new.blocks[0]] > 1 else 0
        if held:
            shared[new.slot] = held * scheduler.config.block_size
        else:
            shared.pop(new.slot, None)
