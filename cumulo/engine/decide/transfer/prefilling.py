"""Prefilling: the orders that a prefill engine computes, and what they change in its scheduler, as an extension of
it. An order's blocks are kept until the receiver releases them.
"""

from dataclasses import dataclass, field

from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.plan import Send, StepPlan, StepResult
from cumulo.engine.decide.transfer.orders import Answer, OrderBegun, OrderFailed, PeerLoad


@dataclass(slots=True)
class Outgoing:
    """What is held for a receiver: references of its own to the blocks."""

    sequence: Sequence
    number: int
    blocks: list[int] = field(default_factory=list)


class Prefilling(Extension):
    def __init__(self, batch: RequestBatch) -> None:
        self._batch = batch
        self.outgoing: dict[str, Outgoing] = {}  # by the order's key, which is its request's id
        self.answers: list[Answer] = []  # the engine takes them

    # -- the points of a step -----------------------------------------------------------------------------
    def admitted(self, sequence: Sequence, cached: int, plan: StepPlan, now_s: float) -> int:
        """An order's blocks are known, and held for the receiver. What this very step fetches from host memory
        cannot be read yet: the step's end tells of it."""
        key = sequence.request.id
        if sequence.request.prefill_only:
            outgoing = self.outgoing[key]
            outgoing.blocks = sequence.blocks[:]
            self._batch.pool.share(outgoing.blocks)
            self.answers.append((key, OrderBegun(outgoing.number, tuple(outgoing.blocks), cached)))
        return 0

    def end_step(self, plan: StepPlan, flight: Flight, now_s: float) -> None:
        for row in range(flight.decoding, len(flight.rows)) if self.outgoing else ():
            sequence = flight.rows[row]
            if sequence.request.prefill_only:
                plan.sends.append(Send(row, sequence.request.id, sequence.computed))

    def after_result(self, plan: StepPlan, flight: Flight, result: StepResult, now_s: float) -> None:
        for send in plan.sends:
            ordered = flight.rows[send.row]
            if ordered.state == State.RUNNING and send.tokens == len(ordered.tokens):
                self._batch.finish(ordered, "stop", now_s)

    def sequence_ended(self, sequence: Sequence, now_s: float) -> None:
        request = sequence.request
        outgoing = self.outgoing.get(request.id)
        if outgoing is not None and request.error is not None:
            self.answers.append((request.id, OrderFailed(outgoing.number, request.error)))

    # -- between steps ------------------------------------------------------------------------------------
    def release(self, key: str, now_s: float) -> None:
        """The receiver has the blocks, or wants them no more."""
        outgoing = self.outgoing.pop(key, None)
        if outgoing is not None:
            self._batch.pool.release(outgoing.blocks)
            if (
                outgoing.sequence.to_compute
            ):  # else it ends with its own result, which may still be on its way
                self._batch.finish_all(outgoing.sequence.request, "abort", now_s)

    def load(self) -> PeerLoad:
        """A prefill engine's word about itself."""
        costs = self._batch.kv.costs
        waiting = sum(
            one.to_compute for request in self._batch.requests.values() for one in request.sequences
        )
        speed = 1.0 / costs.prompt_s_per_token if costs.knows_prompts else 0.0
        return PeerLoad(waiting, len(self._batch.running), speed, self._batch.config.max_running)
