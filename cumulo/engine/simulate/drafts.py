"""Speculation in virtual time: of every draft that a plan verifies, how many tokens are accepted. For `simulate`.

A drafted token is right with a given probability. Whether it is follows from its request and place alone, so that
a run repeats itself to the last bit.
"""

from collections.abc import Mapping
from dataclasses import replace

from cumulo.engine.decide.plan import Rounds, StepPlan, StepResult
from cumulo.engine.decide.request import Sequence
from cumulo.engine.simulate.run import StepCost, StepTime

_PROPOSED, _DRAWN = 1, 0  # a proposed token, and the one that is drawn where it is wrong
_MASK = (1 << 64) - 1


def drafted_result(
    plan: StepPlan, rows: list[Sequence], draws: list[Sequence], acceptance: float
) -> StepResult:
    """What a runner would return. Proposals cost nothing here, as n-gram lookup does; verifying them does."""
    result = StepResult([_DRAWN] * len(draws))
    for row, tokens in plan.drafts:
        number, start = int(rows[row].request.id), plan.starts[row]
        right = 0
        while right < len(tokens) and _uniform(number, start + 1 + right) < acceptance:
            right += 1
        if right:
            result.accepted[row] = tokens[:right]
    if plan.rounds is not None:
        for row, sequence in enumerate(rows):
            result.round_hits[row] = hits = _kept(
                int(sequence.request.id), plan.starts[row], plan.rounds, acceptance
            )
            result.accepted[row] = [_PROPOSED] * (sum(hits) + len(hits) - 1)
    for draw, count in plan.proposals:
        result.proposed[draw] = [_PROPOSED] * count
    return result


def _kept(number: int, start: int, rounds: Rounds, acceptance: float) -> list[int]:
    """Drafts that are kept in each round."""
    hits = []
    for _ in range(rounds.times):
        right = 0
        while right < rounds.depth and _uniform(number, start + 1 + right) < acceptance:
            right += 1
        hits.append(right)
        start += right + 1
    return hits


def rounds_time(plan: StepPlan, rounds: Rounds, cost: StepCost, shared: Mapping[int, int]) -> StepTime:
    """A round computes every row with its drafts; what the head takes is not counted."""
    once = cost.time_of(replace(plan, counts=[rounds.drafts + 1] * len(plan.slots)), shared)
    return StepTime(once.submit_s, once.device_s * rounds.times, once.apply_s)


def _uniform(request: int, place: int) -> float:
    """SplitMix64's output function (Steele, Lea & Flood 2014)."""
    state = (request * 0x9E3779B97F4A7C15 + (place + 1) * 0xD1B54A32D192ED03) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((state ^ (state >> 31)) >> 11) * 2.0**-53
