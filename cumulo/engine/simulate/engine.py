"""The simulated player: the engine's loop in virtual time. Called by the planner and `cumulo simulate serve`.

The scheduler and the block pool are the real ones; a StepClock says how long the steps they plan would take. The
loop is the engine's own (engine.py): with `overlap`, step N+1 is planned and submitted while the device
computes N, so a newcomer waits for the step that runs and for the one behind it, here as there. In a pipeline a
step passes one stage after the other, each in its part of the step's time, and as many steps as stages are on
their way. Nothing is random: the same arrivals and costs give the same times to the last bit.
"""

from array import array
from collections import deque
from collections.abc import Sequence as ListLike
from functools import lru_cache

from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.simulate.disk import SimulatedDisk
from cumulo.engine.simulate.drafts import SimulatedHead, rounds_time
from cumulo.engine.simulate.lockstep import Lockstep
from cumulo.engine.simulate.results import enter_result, note_settled, play_stretch
from cumulo.engine.simulate.run import Arrival, Run, Served, StepClock, StepInFlight
from cumulo.errors import InvalidRequest

_OWN_TOKEN = 1 << 23  # from here on tokens of a prompt that its answer repeats


def simulate(
    arrivals: ListLike[Arrival],
    scheduler: Scheduler,
    cost: StepClock,
    *,
    overlap: bool = True,
    stop_s: float = float("inf"),
    step_by_step: bool = False,
    acceptance: float = 0.0,
    head: SimulatedHead | None = None,
    itl_bound_s: float | None = None,
) -> Run:
    """Serve all arrivals, given in order of time. Ends when the last is answered or, unfinished, at `stop_s`.
    `acceptance`: with a scheduler that speculates, how often a drafted token is right. `itl_bound_s`: by which
    requests will be judged."""
    engine = SimulatedEngine(
        scheduler, cost, overlap=overlap, step_by_step=step_by_step, acceptance=acceptance, head=head
    )
    engine.arrivals, engine.run.itl_bound_s = list(arrivals), itl_bound_s
    engine.advance(stop_s)
    return engine.end()


class SimulatedEngine:
    """One engine in virtual time. A fleet advances several of them to each arrival and then says who gets it.

    Stretches in which everybody only decodes are played without asking the scheduler at every step, with the same
    outcome; `step_by_step` asks it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepClock,
        *,
        overlap: bool = True,
        step_by_step: bool = False,
        acceptance: float = 0.0,
        head: SimulatedHead | None = None,
        disk: SimulatedDisk | None = None,
    ) -> None:
        """`acceptance` and `head`: of drafts, with a scheduler that speculates. `disk`: of the KV tier, with one
        that has it."""
        self.scheduler, self.cost, self.overlap = scheduler, cost, overlap
        self.acceptance, self.head = acceptance, head
        self.disk, self._until_s = disk, float("inf")
        self.run, self._lockstep = Run(), Lockstep(scheduler.batch)
        self.arrivals: list[Arrival] = []  # in order of time; those from `_coming` on have not been taken in
        self.clock_s = 0.0
        stages = scheduler.config.pp
        self._stage_free_s = [0.0] * stages
        self._in_flight: deque[StepInFlight] = deque()  # at most one for each stage
        self._coming = 0
        self._shared: dict[int, int] = {}
        # Blocks of tiers move, and promises are learnt from, in the middle of a stretch.
        plain = scheduler.tiers is None and scheduler.config.slo is None
        plain = plain and scheduler.speculation is None
        self._may_stretch = overlap and not step_by_step and stages == 1 and plain

    def advance(self, until_s: float) -> None:
        """Play steps until the clock reaches `until_s`, or until everything that has arrived is answered."""
        scheduler, run, lockstep, arrivals = self.scheduler, self.run, self._lockstep, self.arrivals
        count, self._until_s = len(arrivals), until_s
        while self.clock_s < until_s:
            if self.disk is not None:
                self.disk.exchange(scheduler.tiers, self.clock_s)
            while self._coming < count and arrivals[self._coming].arrived_s <= self.clock_s:
                self.clock_s += take_in(arrivals[self._coming], self._coming, scheduler, self.cost, run)
                self._coming += 1
            if not scheduler.requests and not self._in_flight:
                if self._coming == count:
                    break
                self.clock_s = max(self.clock_s, arrivals[self._coming].arrived_s)
                continue
            if (
                self._may_stretch
                and run.itl_bound_s is None
                and self._in_flight
                and scheduler.queue.count == 0
                and not scheduler.sharing.begin(self.clock_s)
            ):
                next_s = min(until_s, arrivals[self._coming].arrived_s if self._coming < count else until_s)
                stretched = play_stretch(
                    scheduler,
                    lockstep,
                    self.cost,
                    run,
                    self._in_flight[0],
                    self._shared,
                    self.clock_s,
                    next_s,
                )
                if stretched is not None:
                    self.clock_s, self._in_flight[0] = stretched
                    self._stage_free_s[0] = self._in_flight[0].done_s
                    continue
            self._step()

    def waiting_arrivals(self) -> list[Arrival]:
        """Arrivals that the loop has not taken in yet: it looks for them between two steps."""
        return self.arrivals[self._coming :]

    def _step(self) -> None:
        """One turn of the engine's loop: plan and submit a step, and take in the oldest one."""
        scheduler, in_flight = self.scheduler, self._in_flight
        if in_flight and not scheduler.plans_ahead(in_flight[-1].plan, self.clock_s):
            self._finish(in_flight.popleft())
            return
        run = self.run
        plan = scheduler.plan(self.clock_s)
        self._lockstep.follow(plan)
        note_settled(self._lockstep, run)
        if plan is not None:
            _note_shared(plan, scheduler, self._shared)
            if plan.rounds is None:
                time = self.cost.time_of(plan, self._shared)
            else:
                time = rounds_time(plan, plan.rounds, self.cost, self._shared, self.head)
            self.clock_s += time.submit_s
            in_flight.append(StepInFlight(plan, time, self._pass_stages(time.device_s)))
            run.count_step(len(plan.slots), plan.tokens, time.device_s)
        depth = len(self._stage_free_s) if self.overlap else 0
        if in_flight and (plan is None or len(in_flight) > depth):
            self._finish(in_flight.popleft())
        elif plan is None:
            self._wait_for_others()

    def _pass_stages(self, device_s: float) -> float:
        """When a step that is submitted now leaves the last stage."""
        done_s, stages = self.clock_s, len(self._stage_free_s)
        for stage, free_s in enumerate(self._stage_free_s):
            done_s = self._stage_free_s[stage] = max(done_s, free_s) + device_s / stages
        return done_s

    def _wait_for_others(self) -> None:
        """Nothing can be computed and nothing is in flight. An engine alone has only its disk to wait for."""
        if self.disk is not None:
            self.disk.exchange(self.scheduler.tiers, self.clock_s)
        if self.disk is not None and self.disk.next_s < float("inf"):
            coming = (one.arrived_s for one in self.arrivals[self._coming : self._coming + 1])
            self.clock_s = min(self.disk.next_s, self._until_s, *coming)
            return
        raise RuntimeError("the scheduler plans nothing while nothing is in flight: a bug in the scheduler")

    def _finish(self, ready: StepInFlight) -> None:
        self.clock_s = max(self.clock_s, ready.done_s)
        enter_result(
            ready, self.clock_s, self.scheduler, self._lockstep, self.run, self.acceptance, self.head
        )
        self.clock_s += ready.time.apply_s

    def end(self) -> Run:
        """What became of everything, as of now."""
        self._lockstep.settle()
        note_settled(self._lockstep, self.run)
        self.run.ended_s = self.clock_s
        self.run.all_finished = self._coming == len(self.arrivals) and not self.scheduler.requests
        return self.run


def take_in(arrival: Arrival, number: int, scheduler: Scheduler, cost: StepClock, run: Run) -> float:
    """Queue a request; returns what that costs the loop."""
    served = Served(arrival)
    run.served.append(served)
    params = _params(arrival.output_tokens)
    prompt = _prompt(arrival, number, scheduler.config.speculate == "ngram")
    request = Request(
        str(number),
        prompt,
        params,
        seed=0,
        tenant=arrival.tenant,
        arrived_s=arrival.arrived_s,
        tag=served,
    )
    try:
        scheduler.add(request)
    except InvalidRequest as error:
        served.refused = str(error)
    else:
        if arrival.first_token_s is not None:
            _receive(request, arrival.first_token_s, scheduler)
    return cost.arrival_s(arrival.prompt_tokens)


def _receive(request: Request, first_token_s: float, scheduler: Scheduler) -> None:
    """Its keys and values lie where swapped-out blocks do, until the scheduler has room for them on the
    device."""
    sequence, landing = request.sequences[0], scheduler.kv.free_host_blocks
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


def _prompt(arrival: Arrival, number: int, can_repeat: bool = False) -> bytes:
    """Token ids that hash as the traffic shares: a piece's name over and over, then the request's own number.
    With `can_repeat` further ones behind that, each of them once: an answer that repeats them can be looked up.

    As bytes, which an array takes over at once; one by one its tokens would cost more than scheduling them.
    """
    if not arrival.shared and not can_repeat:
        return (array("i", (number,)) * arrival.prompt_tokens).tobytes()
    tokens = array("i")
    for name, length in arrival.shared:
        tokens.extend(array("i", (-1 - name,)) * min(length, arrival.prompt_tokens - len(tokens)))
    own = arrival.prompt_tokens - len(tokens)
    if can_repeat and own:
        tokens.append(number)
        tokens.extend(range(_OWN_TOKEN, _OWN_TOKEN + own - 1))
    else:
        tokens.extend(array("i", (number,)) * own)
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
