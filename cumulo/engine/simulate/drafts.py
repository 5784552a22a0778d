"""Speculation in virtual time: of every draft that a plan verifies, how many tokens are accepted. For `simulate`.

A drafted token is right with a given probability. Whether it is follows from its request and place alone, so that
a run repeats itself to the last bit. For n-gram lookup, which drafts what the text says, the text is made so: an
answer repeats its prompt, and where a draft is to be wrong it has a token of its own. So lookups find nothing for
two tokens behind a wrong draft, as in a real text.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

from cumulo.engine.decide.core.request import Sequence
from cumulo.engine.decide.plan import Rounds, StepPlan, StepResult
from cumulo.engine.simulate.run import Arrival, StepClock, StepTime

_PROPOSED, _DRAWN = 1, 0  # a proposed token, and the one that is drawn where it is wrong
_NEW_TOKEN = 1 << 24  # from here on tokens that a text has once
_MASK = (1 << 64) - 1


def drafted_result(
    plan: StepPlan,
    rows: list[Sequence],
    draws: list[Sequence],
    acceptance: float,
    *,
    by_lookup: bool = False,
) -> StepResult:
    """What a runner would return. Verifying takes time, and a head's proposals (`rounds_time`)."""
    result = StepResult([_DRAWN] * len(draws))
    wrong: dict[int, int] = {}  # drafts by row
    for row, tokens in plan.drafts:
        sequence, start = rows[row], plan.starts[row]
        if by_lookup:
            agree = (token == _text(sequence, start + n, acceptance) for n, token in enumerate(tokens, 1))
            right = sum(itertools.takewhile(bool, agree))
        else:
            right = _right(sequence, start, len(tokens), acceptance)
        wrong[row] = len(tokens) - right
        if right:
            result.accepted[row] = tokens[:right]
    if by_lookup:
        for draw, (sequence, row) in enumerate(zip(draws, plan.draw_rows, strict=True)):
            place = plan.starts[row] + plan.counts[row] - wrong.get(row, 0)
            result.tokens[draw] = _text(sequence, place, acceptance)
    if plan.rounds is not None:
        for row, sequence in enumerate(rows):
            hits = result.round_hits[row] = []
            for _ in range(plan.rounds.times):
                place = plan.starts[row] + sum(hits) + len(hits)
                hits.append(_right(sequence, place, plan.rounds.drafts, acceptance))
            result.accepted[row] = [_PROPOSED] * (sum(hits) + len(hits) - 1)
    for draw, count in plan.proposals:
        result.proposed[draw] = [_PROPOSED] * count
    return result


def _text(sequence: Sequence, place: int, acceptance: float) -> int:
    """The token of an answer at a place. It repeats what its prompt shares with no other."""
    request = sequence.request
    if _uniform(int(request.id), place) >= acceptance:
        return _NEW_TOKEN + place
    arrival: Arrival = request.tag.arrival
    length = sequence.prompt_length
    own = max(1, length - sum(tokens for _, tokens in arrival.shared))
    return sequence.tokens[length - own + (place - length) % own]


def _right(sequence: Sequence, start: int, drafts: int, acceptance: float) -> int:
    """How many drafts behind a place are right, one after the other."""
    number = int(sequence.request.id)
    chances = (_uniform(number, start + place) < acceptance for place in range(1, drafts + 1))
    return sum(itertools.takewhile(bool, chances))


def rounds_time(
    plan: StepPlan, rounds: Rounds, cost: StepClock, shared: Mapping[int, int], head_pass_s: float
) -> StepTime:
    """A round computes every row with its drafts, and its head proposes them one after the other, in `head_pass_s`
    each."""
    once = cost.time_of(replace(plan, counts=[rounds.drafts + 1] * len(plan.slots)), shared)
    proposing_s = rounds.drafts * head_pass_s
    return StepTime(once.submit_s, (once.device_s + proposing_s) * rounds.times, once.apply_s)


def _uniform(request: int, place: int) -> float:
    """SplitMix64's output function (Steele, Lea & Flood 2014)."""
    state = (request * 0x9E3779B97F4A7C15 + (place + 1) * 0xD1B54A32D192ED03) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((state ^ (state >> 31)) >> 11) * 2.0**-53
