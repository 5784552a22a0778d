"""The shares of tenants in a step: which sequences draw a token, and how many prompt tokens of each are
computed. Asked by steps.py.

A step takes as long as its tokens, and whoever comes during it waits for it. So rows and prompts of a step are
bounded by time. Of the rows, tenants with few sequences draw with all of them, and the sequences of one with
many take turns. In a step that computes a short prompt, tenants that were served as much or more draw with one
sequence each: they lose nothing by it, because the rows left out would have made that step longer, and come
right after it.

A short prompt, of a tenant that asks for little else, goes first and may have several steps' worth at once. Where
there is none, the shortest prompt of such a tenant gets most of a step. Neither does if its tenant was served much
more in the last seconds than another that could. The others split what is left evenly, a quarter of a step at
least, so that nobody's prompts stand still.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from operator import attrgetter

from cumulo.engine.decide.core.request import Sequence
from cumulo.engine.decide.sharing.tenants import Tenant

_SHORT = 4  # a prompt that takes so many shared steps, or
_SHORT_TOKENS = 64  # has so many tokens (a question with its chat template), is short
_SHORT_STEPS = 4  # steps' worth of its tokens in one step: fewer steps, each of which has a fixed part
_STILL_FAIR = 2.0  # times what another tenant was served: above, nobody goes first
_TRICKLE = 4  # a quarter of a step is left to the others
_FEWEST_TOKENS = 4  # of a shared step: fewer would read all weights for next to nothing


@dataclass(frozen=True, slots=True)
class Want:
    """A sequence with prompt tokens (or a lost context) to compute."""

    tenant: Tenant
    tokens: int  # that are left to compute
    is_one_of_few: bool = False  # that its tenant asks for
    is_short: bool = False  # from the beginning: the end of a long prompt is not short
    priority: int = 0


def shared_step_tokens(budget: int, seconds: float, s_per_token: float) -> int:
    """How many prompt tokens a step of so many seconds may have."""
    return min(budget, max(_FEWEST_TOKENS, int(seconds / s_per_token)))


def short_tokens(bound: int) -> int:
    """A prompt of so many tokens is short, where a step may have `bound`."""
    return max(bound * _SHORT, _SHORT_TOKENS)


def first_of(wants: ListLike[Want], now_s: float) -> Want | None:
    """The prompt that goes first, if there is one."""
    able = [want for want in wants if want.is_one_of_few and want.is_short] or wants
    fair = _STILL_FAIR * min((want.tenant.recent(now_s) for want in able), default=0.0)
    urgent = (want for want in able if want.is_one_of_few and want.tenant.recent(now_s) <= fair)
    return min(urgent, key=lambda want: want.tokens, default=None)


def by_share(wants: ListLike[Want], budget: int, bound: int, now_s: float) -> list[int]:
    """The tokens of each in a step of about `bound`. Within a tenant the given order holds, and more important
    sequences go before all that."""
    given = [0] * len(wants)
    for priority in sorted({want.priority for want in wants}):
        level = [index for index, want in enumerate(wants) if want.priority == priority]
        spent = sum(given)
        quota = _quotas([wants[index] for index in level], max(0, bound - spent), budget - spent, now_s)
        for index in level:
            tenant = wants[index].tenant
            given[index] = min(wants[index].tokens, quota[tenant])
            quota[tenant] -= given[index]
    return given


def _quotas(wants: ListLike[Want], bound: int, budget: int, now_s: float) -> dict[Tenant, int]:
    """What each tenant may have of a step, never more than it wants."""
    demand: dict[Tenant, int] = {}
    for want in wants:
        demand[want.tenant] = demand.get(want.tenant, 0) + want.tokens
    quota: dict[Tenant, int] = {}
    first, left = first_of(wants, now_s), bound
    if first is not None and (first.is_short or len(demand) > 1):
        most = _SHORT_STEPS * bound if first.is_short else bound - bound // _TRICKLE
        quota[first.tenant] = min(budget, first.tokens, most)
        left = min(budget - quota[first.tenant], max(bound // _TRICKLE, bound - quota[first.tenant]))
        del demand[first.tenant]
    rest = sorted(demand, key=lambda one: demand[one])  # the smallest first: what it leaves is the others'
    for position, tenant in enumerate(rest):
        quota[tenant] = min(demand[tenant], -(-left // (len(rest) - position)))
        left -= quota[tenant]
    return quota


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
