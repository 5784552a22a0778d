"""Verifying drafts: a row with drafts is drawn from at every place, and keeps what agrees. Called by a runner.

Each place is drawn with its own random number, penalties and mask, as if no token had been drafted. So the first
drawn token that differs from its draft is the one that a run without drafts would have drawn there, too.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.play.slot_table import SlotTable, StepRows
from cumulo.engine.sampling.distribution import Ints
from cumulo.engine.sampling.sampler import Drawn


@dataclass(frozen=True, slots=True)
class StepDraws:
    """Every place a step draws a token for: with drafts several in a row, one after the other."""

    slots: Ints
    positions: Ints  # of the drawn tokens
    token_rows: Ints  # among the step's tokens, whose logits they are drawn from
    firsts: Ints  # by the plan's draw, the first of its places


def write_drafts(plan: StepPlan, table: SlotTable) -> None:
    """Drafted tokens follow the known ones; whatever is drawn overwrites them."""
    for row, tokens in plan.drafts:
        slot, end = plan.slots[row], plan.starts[row] + 1
        table.tokens[slot, end : end + len(tokens)] = tokens
        table.lengths[slot] = end + len(tokens)


def draft_places(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(slot, position, token) of every drafted token."""
    return [
        (plan.slots[row], plan.starts[row] + place, token)
        for row, tokens in plan.drafts
        for place, token in enumerate(tokens, 1)
    ]


def draws_of(plan: StepPlan, rows: StepRows) -> StepDraws:
    draw_rows = np.array(plan.draw_rows, dtype=np.int64)
    slots = np.array(plan.draw_slots, dtype=np.int64)
    positions, token_rows = rows.ends[draw_rows], rows.query_starts[draw_rows + 1] - 1
    firsts = np.arange(len(slots))
    if plan.drafts:
        extra = np.zeros(len(slots), dtype=np.int64)
        for row, tokens in plan.drafts:
            extra[row] = len(tokens)
        places = extra + 1
        firsts = np.cumsum(places) - places
        back = np.repeat(extra + firsts, places) - np.arange(places.sum())  # to the row's last place
        slots = np.repeat(slots, places)
        positions = np.repeat(positions, places) - back
        token_rows = np.repeat(token_rows, places) - back
    return StepDraws(slots, positions, token_rows, firsts)


def round_draws(plan: StepPlan, drafts: int) -> tuple[StepRows, StepDraws]:
    """Of a round in which every row verifies as many drafts behind its known token, each in a row of its own."""
    places, count = drafts + 1, len(plan.slots)
    slots, starts = np.array(plan.slots, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
    lanes = np.arange(count * places)
    slots, starts = np.repeat(slots, places), np.repeat(starts, places) + lanes % places
    rows = StepRows.from_columns(slots, starts, np.ones(len(lanes), dtype=np.int64))
    return rows, StepDraws(slots, starts + 1, lanes, lanes[::places])


def take_rounds(plan: StepPlan, told: NDArray[np.int32], table: SlotTable, result: StepResult) -> None:
    """For each row, what was kept in all rounds. `told` [rows, rounds, 1 + places]: how many drafts were kept
    in a round, and what was drawn at its places."""
    for row, (slot, start) in enumerate(zip(plan.slots, plan.starts, strict=True)):
        tokens: list[int] = []
        hits = told[row, :, 0].tolist()
        for kept, drawn in zip(hits, told[row, :, 1:].tolist(), strict=True):
            tokens += drawn[: kept + 1]
        failed = next((index for index, token in enumerate(tokens) if token < 0), None)
        if failed == 0:
            result.errors[row] = "the model returned NaN or infinite logits"
            tokens = [0]
        elif failed is not None:
            tokens = tokens[:failed]  # it is drawn again in the next step
        end = start + 1 + len(tokens)
        table.tokens[slot, start + 1 : end], table.lengths[slot] = tokens, end
        result.tokens.append(tokens[-1])
        result.accepted[row] = tokens[:-1]
        result.round_hits[row] = hits


def take_accepted(
    plan: StepPlan, draws: StepDraws, drawn: Drawn, table: SlotTable, result: StepResult
) -> None:
    """Of each row the drafts that were drawn, and the token drawn after them."""
    tokens = drawn.tokens.tolist()
    last = draws.firsts.copy()  # of each draw, the place of the token that counts
    for row, drafted in plan.drafts:
        first = int(draws.firsts[row])
        count = 0
        # A place that failed behind a draft is drawn again in the next step, without one.
        while (
            first not in drawn.errors
            and count < len(drafted)
            and tokens[first + count] == drafted[count]
            and first + count + 1 not in drawn.errors
        ):
            count += 1
        last[row] = first + count
        if count:
            result.accepted[row] = drafted[:count]
            if first in drawn.logprobs:
                result.accepted_logprobs[row] = [drawn.logprobs[first + place] for place in range(count)]
    table.write_drawn(draws.slots[last], draws.positions[last], drawn.tokens[last])
    result.tokens = drawn.tokens[last].tolist()
    for draw, place in enumerate(last.tolist()):
        if place in drawn.logprobs:
            result.logprobs[draw] = drawn.logprobs[place]
        if place in drawn.errors:
            result.errors[draw] = drawn.errors[place]
