"""What the result of a step changes: tokens, log-probabilities and embeddings are entered, who is done ends.

Called by the scheduler, which owns the books that are changed here.
"""

from math import isfinite
from typing import TYPE_CHECKING

from cumulo.engine.decide.beam_groups import advance_beams
from cumulo.engine.decide.books import Books, Flight
from cumulo.engine.decide.plan import StepPlan, StepResult, TokenLogprobs
from cumulo.engine.decide.request import Request, Sequence, State

if TYPE_CHECKING:
    from cumulo.engine.decide.pooling import Vector


def enter_result(
    books: Books, flight: Flight, plan: StepPlan, result: StepResult, now_s: float
) -> list[Sequence]:
    """Returns the sequences that gained a token (beams excepted)."""
    ended = _enter_accepted(books, flight, plan, result, now_s) if plan.may_accept else []
    books.residency.register_full(flight.rows, plan)
    for row, logprobs in result.prompt_logprobs.items():
        _take_prompt_logprobs(flight.rows[row], plan.starts[row], logprobs)
    for row, first, total in zip(plan.pool_rows, plan.pool_starts, result.pooled, strict=True):
        end = plan.starts[row] + plan.counts[row]
        _take_pooled(books, flight.rows[row], first, end, total, now_s)
    for send in plan.sends:
        ordered = flight.rows[send.row]
        if ordered.state == State.RUNNING and send.tokens == len(ordered.tokens):
            books.finish(ordered, "stop", now_s)
    for index, error in result.errors.items():
        if flight.draws[index].state != State.FINISHED:
            books.fail(flight.draws[index].request, error, now_s)
    beams = _take_logprobs(books, flight.draws, result.logprobs)

    # This loop runs for every sequence at every step: keep it lean.
    advanced: list[Sequence] = ended
    finished = State.FINISHED
    for sequence, token in zip(flight.draws, result.tokens, strict=True):
        sequence.pending -= 1
        if sequence.state == finished:
            continue  # failed, aborted, or ended by a stop string, while this step ran
        request = sequence.request
        request.share.output_tokens += 1
        if request.beam is not None:
            continue
        tokens = sequence.tokens
        tokens.append(token)
        advanced.append(sequence)
        if request.story.first_token_s is None:
            request.story.first_token_s = now_s
            request.story.add(now_s, "first_token")
        if token in request.stop_ids:
            books.finish(sequence, "stop", now_s, token)
        elif len(tokens) >= sequence.limit:
            books.finish(sequence, "length", now_s)
    for request in beams:
        advance_beams(books, request, now_s)
    return advanced


def _enter_accepted(
    books: Books, flight: Flight, plan: StepPlan, result: StepResult, now_s: float
) -> list[Sequence]:
    """Drafted tokens that were accepted; what was computed for the others is forgotten: their places in the cache
    are written again. Returns the sequences that ended on the way; for others the token drawn last comes after."""
    ended: list[Sequence] = []
    books.gained = {}
    for row in range(len(flight.rows)) if plan.rounds is not None else [row for row, _ in plan.drafts]:
        sequence = flight.rows[row]
        accepted = result.accepted.get(row, [])
        if sequence.state != State.RUNNING:
            continue  # failed, aborted, or ended by a stop string, while this step ran
        request, start = sequence.request, plan.starts[row]
        stop = next((n for n, token in enumerate(accepted, 1) if token in request.stop_ids), None)
        stops_at = None if stop is None else accepted[stop - 1]
        room = sequence.limit - len(sequence.tokens)
        if len(accepted[:stop]) >= room and (stop is None or stop > room):
            stop, stops_at = room, None  # a device's rounds may pass the limit
        sequence.tokens.extend(accepted[:stop])
        sequence.computed = start + 1 + len(accepted[:stop])
        request.share.output_tokens += len(accepted[:stop])
        request.story.accepted_tokens += _drafts_among(len(accepted[:stop]), result.round_hits.get(row))
        for found in result.accepted_logprobs.get(row, [])[:stop]:
            sequence.cumulative_logprob += found.logprob
            sequence.logprobs.append(found)
        if start // books.pool.block_size != sequence.computed // books.pool.block_size:
            books.residency.register_blocks(sequence, start, sequence.computed)
        books.gained[sequence] = len(accepted[:stop]) + (stop is None)
        if stop is not None:
            books.finish(sequence, "length" if stops_at is None else "stop", now_s, stops_at)
            ended.append(sequence)
    return ended


def take_back(sequence: Sequence, count: int) -> None:
    """The last `count` tokens are no part of the answer: a stop string was complete before them."""
    if count <= 0:
        return
    del sequence.tokens[-count:]
    for found in sequence.logprobs[-count:]:
        sequence.cumulative_logprob -= found.logprob
    del sequence.logprobs[-count:]
    request = sequence.request
    request.share.output_tokens -= count
    if request.story.finished_s is not None:
        request.story.output_tokens -= count


def _take_logprobs(books: Books, draws: list[Sequence], logprobs: dict[int, TokenLogprobs]) -> list[Request]:
    """Returns the requests whose beams got candidates."""
    beams: dict[str, Request] = {}
    for index, found in logprobs.items():
        sequence = draws[index]
        if sequence.state == State.FINISHED:
            continue
        if sequence.request.beam is None:
            sequence.cumulative_logprob += found.logprob
            sequence.logprobs.append(found)
        else:
            sequence.candidates = found.top
            if sequence.state == State.WAITING:
                books.queue.set_aside(sequence)
            beams[sequence.request.id] = sequence.request
    return list(beams.values())


def _take_prompt_logprobs(sequence: Sequence, start: int, logprobs: list[TokenLogprobs]) -> None:
    taken = sequence.request.prompt_logprobs
    if taken is not None:  # a recomputation delivers some of them again
        taken.extend(logprobs[len(taken) - start :])


def _take_pooled(
    books: Books, sequence: Sequence, first: int, end: int, total: "Vector", now_s: float
) -> None:
    request = sequence.request
    if request.pooled is None or sequence.state == State.FINISHED:
        return  # aborted while this step ran
    if not isfinite(total.sum()):
        books.fail(request, "the model returned hidden states that are not finite", now_s)
    elif request.pooled.add(first, end, total):
        request.story.add(now_s, "embedded", tokens=end, size=len(total))
        books.finish(sequence, "stop", now_s)


def _drafts_among(entered: int, round_hits: list[int] | None) -> int:
    """Of the tokens that a row gained before its last one: in rounds a draw of each lies behind its drafts."""
    if round_hits is None:
        return entered
    drafts = 0
    for hits in round_hits:
        drafts += min(hits, entered)
        entered = max(0, entered - hits - 1)
    return drafts
