"""RequestBatch: all requests that have not ended, who of them runs and who waits, and how they end. Owned by the
scheduler; admission, results of steps and extensions change it.
"""

from bisect import insort
from operator import attrgetter

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.extension import Flight, Points
from cumulo.engine.decide.core.kv_manager import KVManager
from cumulo.engine.decide.core.queue import WaitingQueue
from cumulo.engine.decide.core.request import FinishReason, Request, Sequence, State
from cumulo.engine.decide.plan import StepPlan

_by_order = attrgetter("request.order")


class RequestBatch:
    def __init__(self, config: SchedulerConfig, queue: WaitingQueue) -> None:
        self.config, self.queue = config, queue
        self.kv = KVManager(config)
        self.pool = self.kv.pool
        self.points = Points()
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.closed: list[Request] = []  # ended since the engine last looked; it empties the list
        self.running: list[Sequence] = []  # in order; may hold ended sequences until the next plan
        self.in_flight: dict[int, Flight] = {}  # by the index of the plan
        self.gained: dict[Sequence, int] = {}  # tokens of the last result, where a row gained several
        self.last_result_s = float("-inf")  # when the last result came
        self.longest_step_s = float("inf")  # that a step may take, where somebody was promised so
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
        if slot >= 0:
            self.next_plan.end.append(slot)
            self.kv.free_slots.append(slot)
        for one in self.points.sequence_ended:
            one.sequence_ended(sequence, now_s)
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        sequence.hashes = []
        story = sequence.request.story
        if reason == "length" and story.limited_by != "max_tokens":
            story.add(now_s, "full", what=story.limited_by)
        story.add(
            now_s, "finished", sample=sequence.sample_index, reason=reason, tokens=sequence.output_length
        )
        self._close_if_done(sequence.request, now_s)

    def remove(self, sequence: Sequence) -> int:
        """Take a sequence out of the running or the queue; the slot it had, or -1, is the caller's."""
        was, sequence.state = sequence.state, State.FINISHED
        if was == State.RUNNING:
            self.kv.release_blocks(sequence)
        elif was == State.WAITING:
            self.queue.leave(sequence)
        slot, sequence.slot = sequence.slot, -1
        return slot

    def _close_if_done(self, request: Request, now_s: float) -> None:
        if request.finished and self.requests.pop(request.id, None) is not None:
            self.kv.free_slots += request.reserved_slots
            request.reserved_slots = []
            request.story.finish(now_s, sum(s.output_length for s in request.sequences))
            self.closed.append(request)
            for one in self.points.request_ended:
                one.request_ended(request, now_s)
