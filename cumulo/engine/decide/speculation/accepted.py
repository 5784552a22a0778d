"""What both kinds of speculation share: how many drafts a step has room for, and how accepted ones are
entered."""

from collections.abc import Iterable

from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight
from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.speculation.choose import most_draws


def draft_budget(batch: RequestBatch, plan: StepPlan, flight: Flight) -> int:
    """Drafted tokens for which a planned step has room, time and places for their logits."""
    tokens = flight.spare_tokens
    for one in batch.points.bound_tokens:
        tokens = one.bound_tokens(plan, tokens)
    return min(tokens, most_draws(batch.config.max_running, True) - len(flight.draws))


class Accepted(Extension):
    """Drafted tokens that were accepted are entered; what was computed for the others is forgotten: their places in
    the cache are written again."""

    def __init__(self, batch: RequestBatch) -> None:
        self._batch = batch

    def before_result(
        self, plan: StepPlan, flight: Flight, result: StepResult, now_s: float
    ) -> Iterable[Sequence]:
        """The sequences that ended on the way; for others the token drawn last comes after."""
        if not plan.may_accept:
            return ()
        batch = self._batch
        ended: list[Sequence] = []
        batch.gained = {}
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
            request.usage.output_tokens += len(accepted[:stop])
            request.story.accepted_tokens += _drafts_among(len(accepted[:stop]), result.round_hits.get(row))
            for found in result.accepted_logprobs.get(row, [])[:stop]:
                sequence.cumulative_logprob += found.logprob
                sequence.logprobs.append(found)
            if start // batch.pool.block_size != sequence.computed // batch.pool.block_size:
                batch.kv.register_blocks(sequence, start, sequence.computed)
            batch.gained[sequence] = len(accepted[:stop]) + (stop is None)
            if stop is not None:
                batch.finish(sequence, "length" if stops_at is None else "stop", now_s, stops_at)
                ended.append(sequence)
        return ended


def _drafts_among(entered: int, round_hits: list[int] | None) -> int:
    """Drafts among the tokens that a row gained before its last one: in rounds a draw of each lies behind its
    drafts."""
    if round_hits is None:
        return entered
    drafts = 0
    for hits in round_hits:
        drafts += min(hits, entered)
        entered = max(0, entered - hits - 1)
    return drafts
