"""The shares of tenants in a step: which sequences draw a token, and how many prompt tokens of each are
computed. Asked by steps.py.

A step takes as long as its tokens, and whoever comes during it waits for it. So rows and prompts of a step are
bounded by time. Of the rows, tenants with few sequences draw with all of them, and the sequences of one with
many take turns. In a step that computes a short prompt, tenants that were served as much or more draw with one
sequence each: they lose nothing by it, because the rows left out would have made that step longer, and come
right after it.

A short prompt, of a tenant that asks for little else, has the prompt part for itself until it is computed (a
*turn*); the others get a step after each turn, so that nobody's prompts stand still. Of several such tenants
the one with the shortest prompt goes first, unless it was served much more in the last seconds. All others
split a step evenly, but one whose prompt is much shorter than theirs gets most of it.
"""

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from operator import attrgetter

from cumulo.engine.decide.core.request import Sequence
from cumulo.engine.decide.sharing.tenants import Tenant

_SHORT = 4  # a prompt that takes so many shared steps, or
_SHORT_TOKENS = 64  # has so many tokens (a question with its chat template), is short
_TURN = 3  # steps' worth of prompt tokens in a step of a turn: fewer steps, each of which has a fixed part
_STILL_FAIR = 2.0  # times what another tenant was served: above, nobody goes first for being short
_MUCH_SHORTER = 2  # times: then a prompt gets most of a step, and the others
_TRICKLE = 4  # ... a quarter
_FEWEST_TOKENS = 4  # of a shared step: fewer would read all weights for next to nothing


@dataclass(frozen=True, slots=True)
class Want:
    """A sequence with prompt tokens (or a lost context) to compute."""

    tenant: Tenant
    tokens: int  # that are left to compute
    is_short: bool = False  # from the beginning, and one of few that its tenant asks for
    priority: int = 0


@dataclass(slots=True)
class Turns:
    """What is remembered from step to step."""

    others_wait: bool = False  # a turn was completed, and prompts without a turn have had no step since


def shared_step_tokens(budget: int, seconds: float, s_per_token: float) -> int:
    """How many prompt tokens a step of so many seconds may have."""
    return min(budget, max(_FEWEST_TOKENS, int(seconds / s_per_token)))


def short_tokens(bound: int) -> int:
    """A prompt of so many tokens is short, where a step may have `bound`."""
    return max(bound * _SHORT, _SHORT_TOKENS)


def whose_turn(wants: ListLike[Want], now_s: float) -> Want | None:
    """The short prompt that has the next step for itself: one of each tenant is looked at."""
    short: dict[Tenant, Want] = {}
    for want in wants:
        if want.is_short:
            short.setdefault(want.tenant, want)
    return short[_first({tenant: want.tokens for tenant, want in short.items()}, now_s)] if short else None


def _first(demand: Mapping[Tenant, int], now_s: float) -> Tenant:
    """Who wants least, of those who were not served much more in the last seconds than another."""
    fair = _STILL_FAIR * min(tenant.recent(now_s) for tenant in demand)
    return min(
        (tenant for tenant in demand if tenant.recent(now_s) <= fair), key=lambda tenant: demand[tenant]
    )


def by_share(wants: ListLike[Want], budget: int, bound: int, now_s: float, turns: Turns) -> list[int]:
    """The tokens of each in a step of about `bound`. Within a tenant the given order holds, and more important
    sequences go before all that."""
    given = [0] * len(wants)
    for priority in sorted({want.priority for want in wants}):
        level = [index for index, want in enumerate(wants) if want.priority == priority]
        spent = sum(given)
        quota = _quotas(
            [wants[index] for index in level], max(0, bound - spent), budget - spent, now_s, turns
        )
        for index in level:
            tenant = wants[index].tenant
            given[index] = min(wants[index].tokens, quota[tenant])
            quota[tenant] -= given[index]
    return given


def _quotas(wants: ListLike[Want], bound: int, budget: int, now_s: float, turns: Turns) -> dict[Tenant, int]:
    """What each tenant may have of a step, never more than it wants."""
    demand: dict[Tenant, int] = {}
    for want in wants:
        demand[want.tenant] = demand.get(want.tenant, 0) + want.tokens
    turn = whose_turn(wants, now_s)
    if turn is None:
        turns.others_wait = False
        return _evenly(demand, bound, now_s)
    quota = dict.fromkeys(demand, 0)
    without = {want.tenant: demand[want.tenant] for want in wants if not want.is_short}
    if turns.others_wait and without:
        turns.others_wait = False
        return quota | _evenly(without, bound, now_s)
    # Half a step more rather than another one for the last few tokens.
    step = _TURN * bound
    tokens = min(budget, turn.tokens if turn.tokens <= step + step // 2 else step)
    quota[turn.tenant] = tokens
    turns.others_wait = bool(without) and tokens == turn.tokens
    return quota


def _evenly(demand: dict[Tenant, int], bound: int, now_s: float) -> dict[Tenant, int]:
    quota: dict[Tenant, int] = {}
    left = bound
    rest = sorted(demand, key=lambda one: demand[one])  # the smallest first: what it leaves is the others'
    if len(rest) > 1 and (first := _first(demand, now_s)) is rest[0] and _is_much_shorter(demand, rest):
        quota[first] = min(demand[first], bound - bound // _TRICKLE)
        left -= quota[first]
        rest.remove(first)
    for position, tenant in enumerate(rest):
        quota[tenant] = min(demand[tenant], -(-left // (len(rest) - position)))
        left -= quota[tenant]
    return quota


def _is_much_shorter(demand: dict[Tenant, int], by_length: list[Tenant]) -> bool:
    first, second = by_length[:2]
    return not first.waiting and (second.waiting > 0 or _MUCH_SHORTER * demand[first] <= demand[second])


_by_last_step = attrgetter("last_step")


def decoding(running: ListLike[Sequence]) -> list[Sequence]:
    """Requests whose next token needs one row."""
    return [
        one
        for one in running
        if one.prompt_length <= one.computed == len(one.tokens) + one.pending - 1 < one.limit - 1
    ]


def rows_to_leave_out(
    ready: ListLike[Sequence], bound: int, newcomer: Tenant | None, now_s: float
) -> list[Sequence]:
    """Of the sequences that could draw a token, those that wait for a later step. `newcomer`: the tenant
    whose short prompt is computed in this step."""
    by_tenant: dict[Tenant, list[Sequence]] = {}
    for sequence in ready:
        by_tenant.setdefault(sequence.request.usage, []).append(sequence)
    counts = {tenant: len(own) for tenant, own in by_tenant.items()}
    if newcomer is not None:
        served = newcomer.recent(now_s)
        for tenant in counts:
            if tenant.recent(now_s) >= served:
                counts[tenant] = 1
    quotas = even_quotas(counts, bound)
    left_out: list[Sequence] = []
    for tenant, own in by_tenant.items():
        if quotas[tenant] < len(own):  # who has waited longest comes first
            left_out += sorted(own, key=_by_last_step)[quotas[tenant] :]
    return left_out


def even_quotas(counts: dict[Tenant, int], bound: int) -> dict[Tenant, int]:
    """`bound` rows split evenly, what some do not need going to the others; one each at least."""
    quotas: dict[Tenant, int] = {}
    left = bound
    by_count = sorted(counts, key=lambda tenant: counts[tenant])
    for position, tenant in enumerate(by_count):
        quotas[tenant] = min(counts[tenant], max(1, left // (len(by_count) - position)))
        left -= quotas[tenant]
    return quotas
