"""What the result of a step changes: tokens, log-probabilities and embeddings are entered, who is done ends. Called
by the scheduler.
"""

from math import isfinite
from typing import TYPE_CHECKING

from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Flight
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.plan import StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from cumulo.engine.decide.core.pooling import Vector


def enter_result(
    batch: RequestBatch, flight: Flight, plan: StepPlan, result: StepResult, now_s: float
) -> list[Sequence]:
    """Returns the sequences that gained a token (beams excepted)."""
    advanced: list[Sequence] = []
    for one in batch.points.before_result:
        advanced += one.before_result(plan, flight, result, now_s)
    batch.kv.register_full(flight.rows, plan)
    for row, logprobs in result.prompt_logprobs.items():
        _take_prompt_logprobs(flight.rows[row], plan.starts[row], logprobs)
    for row, first, total in zip(plan.pool_rows, plan.pool_starts, result.pooled, strict=True):
        end = plan.starts[row] + plan.counts[row]
        _take_pooled(batch, flight.rows[row], first, end, total, now_s)
    for index, error in result.errors.items():
        if flight.draws[index].state != State.FINISHED:
            batch.fail(flight.draws[index].request, error, now_s)
    for index, found in result.logprobs.items():
        sequence = flight.draws[index]
        if sequence.state != State.FINISHED and sequence.request.beam is None:
            sequence.cumulative_logprob += found.logprob
            sequence.logprobs.append(found)

    # This loop runs for every sequence at every step: keep it lean.
    finished = State.FINISHED
    for sequence, token in zip(flight.draws, result.tokens, strict=True):
        sequence.pending -= 1
        if sequence.state == finished:
            continue  # failed, aborted, or ended by a stop string, while this step ran
        request = sequence.request
        request.usage.output_tokens += 1
        if request.beam is not None:
            continue  # its token is chosen, not drawn
        tokens = sequence.tokens
        tokens.append(token)
        advanced.append(sequence)
        if request.story.first_token_s is None:
            request.story.note_token(now_s)
        if token in request.stop_ids:
            batch.finish(sequence, "stop", now_s, token)
        elif len(tokens) >= sequence.limit:
            batch.finish(sequence, "length", now_s)
    for one in batch.points.after_result:
        one.after_result(plan, flight, result, now_s)
    return advanced


def take_back(sequence: Sequence, count: int) -> None:
    """The last `count` tokens are no part of the answer: a stop string was complete before them."""
    if count <= 0:
        return
    del sequence.tokens[-count:]
    for found in sequence.logprobs[-count:]:
        sequence.cumulative_logprob -= found.logprob
    del sequence.logprobs[-count:]
    sequence.request.usage.output_tokens -= count
    story = sequence.request.story
    if story.finished_s is not None:
        story.output_tokens -= count


def _take_prompt_logprobs(sequence: Sequence, start: int, logprobs: list[TokenLogprobs]) -> None:
    taken = sequence.request.prompt_logprobs
    if taken is not None:  # a recomputation delivers some of them again
        taken.extend(logprobs[len(taken) - start :])


def _take_pooled(
    batch: RequestBatch, sequence: Sequence, first: int, end: int, total: "Vector", now_s: float
) -> None:
    request = sequence.request
    if request.pooled is None or sequence.state == State.FINISHED:
        return  # aborted while this step ran
    if not isfinite(total.sum()):
        batch.fail(request, "the model returned hidden states that are not finite", now_s)
    elif request.pooled.add(first, end, total):
        request.story.add(now_s, "embedded", tokens=end, size=len(total))
        batch.finish(sequence, "stop", now_s)
