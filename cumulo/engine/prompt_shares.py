"""Prompt shares: how many prompt tokens of each sequence a step computes. Asked by the scheduler, for every step
that has prompts.

A step takes as long as its tokens, and everybody's next token waits for it. While one tenant is here alone, a step
is filled in order of arrival: that is the fastest way through its prompts. Once a second tenant is about, three
things change. The prompt part of a step is bounded by time (`shared_step_s`), so that a newcomer never waits for a
step that another tenant's long prompt has filled. A tenant that was served least in the last seconds comes first
and may exceed the bound by a burst, so that a short prompt is computed in one step. The others keep a trickle, so
that their prompts always get on.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from cumulo.engine.fairness import Tenant

_BURST = 4  # times the bound, for the tenant served least
_TRICKLE = 4  # a quarter of the bound is left to the others
_CLEARLY_LESS = 0.5  # of what the next tenant was served: then its burst is allowed
_FEWEST_TOKENS = 8  # of a shared step: fewer would read all weights for next to nothing
SHORT_SHARE = 4  # a newcomer that needs a quarter of a step or less is short


@dataclass(frozen=True, slots=True)
class Want:
    """A sequence with prompt tokens (or a lost context) to compute."""

    tenant: Tenant
    tokens: int
    priority: int = 0


def shared_step_tokens(budget: int, shared_step_s: float, s_per_token: float) -> int:
    """How many prompt tokens a step may have while several tenants are about."""
    return min(budget, max(_FEWEST_TOKENS, int(shared_step_s / s_per_token)))


def by_share(wants: ListLike[Want], budget: int, bound: int, now_s: float) -> list[int]:
    """Several tenants: about `bound` tokens in all, split evenly between the tenants that want them; one that was
    served clearly less than all others in the last seconds comes first. Within a tenant the given order holds, and
    more important sequences go before all that."""
    given = [0] * len(wants)
    for priority in sorted({want.priority for want in wants}):
        level = [index for index, want in enumerate(wants) if want.priority == priority]
        demand: dict[Tenant, int] = {}
        for index in level:
            demand[wants[index].tenant] = demand.get(wants[index].tenant, 0) + wants[index].tokens
        spent = sum(given)
        quota = _quotas(demand, max(0, bound - spent), budget - spent, now_s)
        for index in level:
            tenant = wants[index].tenant
            given[index] = min(wants[index].tokens, quota[tenant])
            quota[tenant] -= given[index]
    return given


def _quotas(demand: dict[Tenant, int], bound: int, budget: int, now_s: float) -> dict[Tenant, int]:
    """What each tenant may have of a step, never more than it wants."""
    quota: dict[Tenant, int] = {}
    by_service = sorted(demand, key=lambda tenant: tenant.recent(now_s))
    if len(by_service) > 1:
        first, second = by_service[:2]
        if first.recent(now_s) <= _CLEARLY_LESS * second.recent(now_s):
            quota[first] = min(demand[first], bound * _BURST, budget)
            bound = max(bound - quota[first], bound // _TRICKLE)
            budget -= quota[first]
    rest = sorted((tenant for tenant in by_service if tenant not in quota), key=lambda one: demand[one])
    left = min(bound, budget)
    for position, tenant in enumerate(rest):  # the smallest first: what it leaves is the others'
        quota[tenant] = min(demand[tenant], -(-left // (len(rest) - position)))
        left -= quota[tenant]
    return quota
