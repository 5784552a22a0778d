"""Books: all requests that have not ended, who runs, who waits, and what the next plan begins with. Owned by the
scheduler; admission, beams and results of steps change it.
"""

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from cumulo.engine.decide.adapters.book import AdapterBook
from cumulo.engine.decide.fairness import FairShares
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.request import FinishReason, Request, Sequence, State
from cumulo.engine.decide.residency import Residency
from cumulo.engine.decide.scheduler_config import SchedulerConfig
from cumulo.engine.decide.slo.promises import Promises
from cumulo.engine.decide.transfer.under_way import Transfers
from cumulo.engine.decide.waiting_queue import WaitingQueue

_by_order = attrgetter("request.order")


@dataclass(slots=True)
class Flight:
    """Whose a planned step is, until its result is there."""

    rows: list[Sequence]
    draws: list[Sequence]


class Books:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.residency = Residency(config)
        self.pool = self.residency.pool
        self.shares = FairShares()
        self.queue = WaitingQueue(self.shares)
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.closed: list[Request] = []  # ended since the engine last looked; it empties the list
        self.running: list[Sequence] = []  # in order; may hold ended sequences until the next plan
        self.in_flight: dict[int, Flight] = {}
        self.transfers = Transfers()
        self.adapters = AdapterBook()
        self.gained: dict[Sequence, int] = {}  # tokens of the last result, where drafts were accepted
        self.promises: Promises | None = None  # from the first request on that has an SLO
        self.next_plan = StepPlan(0)  # collects what happens between plans: ended slots, the next beams

    def add_running(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=_by_order)

    def drop_ended(self) -> None:
        self.running[:] = [sequence for sequence in self.running if sequence.state == State.RUNNING]

    # -- requests and sequences end -----------------------------------------------------------------------
    def fail(self, request: Request, error: str, now_s: float) -> None:
        """End a request with an error its client sees."""
        request.error = error
        request.story.add(now_s, "failed", error=error)
        self.finish_all(request, "error", now_s)

    def finish_all(self, request: Request, reason: FinishReason, now_s: float) -> None:
        request.forks_left = 0
        for sequence in list(request.sequences):
            self.finish(sequence, reason, now_s)
        self._close_if_done(request, now_s)

    def finish(
        self, sequence: Sequence, reason: FinishReason, now_s: float, stop_reason: int | str | None = None
    ) -> None:
        """End one sequence and free what it holds. Ending it twice does nothing."""
        if sequence.state == State.FINISHED:
            return
        slot = self.remove(sequence)
        if slot is not None:
            self.next_plan.end.append(slot)
            self.residency.free_slots.append(slot)
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        sequence.hashes = []
        request = sequence.request
        request.story.add(
            now_s, "finished", sample=sequence.sample_index, reason=reason, tokens=sequence.output_length
        )
        if request.sends:
            self.transfers.answer(sequence, now_s)
        self._close_if_done(request, now_s)

    def remove(self, sequence: Sequence) -> int | None:
        """Take a sequence out of the running or the queue; the slot it had, if any, is the caller's."""
        was, sequence.state = sequence.state, State.FINISHED
        if was == State.RUNNING:
            return self.residency.vacate(sequence)
        incoming = self.transfers.of_request.get(sequence.request.id)
        if was == State.RECEIVING and incoming is not None:
            return self.transfers.give_up(incoming)
        self.queue.leave(sequence)
        self.residency.forget_swapped(sequence)
        if incoming is not None:
            self.transfers.give_up(incoming)
        return None

    def _close_if_done(self, request: Request, now_s: float) -> None:
        if request.finished and self.requests.pop(request.id, None) is not None:
            self.residency.free_slots += request.reserved_slots
            request.reserved_slots = []
            self.shares.went(request.share, now_s)
            self.adapters.end(request.adapter)
            request.story.finish(now_s, sum(s.output_length for s in request.sequences))
            self.closed.append(request)
            if self.promises is not None:
                self.promises.drop(request)

    # -- invariants ---------------------------------------------------------------------------------------
    def problems(self) -> list[str]:
        requests = list(self.requests.values())
        seated = [s for s in self.running if s.state == State.RUNNING]
        seated += [one.sequence for one in self.transfers.of_request.values() if one.plan is not None]
        held = [one.blocks for one in self.transfers.incoming.values()]
        held += [one.blocks for one in self.transfers.outgoing.values()]
        found = self.residency.problems(seated, requests, held)
        waiting = sum(s.state == State.WAITING for request in requests for s in request.sequences)
        if waiting != self.queue.count:
            found.append(f"{waiting} sequences wait, {self.queue.count} counted")
        return found
