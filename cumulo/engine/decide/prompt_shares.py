"""Prompt shares: how many prompt tokens of each sequence a step computes. Asked by the scheduler, for every step
that has prompts.

A step takes as long as its tokens, and everybody's next token waits for it. While one tenant is here alone, a step
is filled in order of arrival: that is the fastest way through its prompts. Once a second tenant is about, three
things change. The prompt part of a step is bounded by time (`shared_step_s`), so that a newcomer never waits for a
step that another tenant's long prompt has filled. A short prompt may exceed the bound by a burst, so that it is
computed in one step: in each step that of the tenant served least, unless it was served much more in the last
seconds than another that is about, because that one may ask again at any moment. The others keep a trickle, so that
their prompts always get on.
"""

import math
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from cumulo.engine.decide.fairness import Tenant

_BURST = 4  # times the bound, for short prompts and for a tenant that was served clearly less,
_BURST_TOKENS = 64  # and at least so many: a short question with its chat template
_TRICKLE = 4  # a quarter of the bound is left to the others
_STILL_FAIR = 2.0  # times what another tenant was served: above, even short prompts get no burst
_CLEARLY_LESS = 0.5  # of what another tenant was served: then long prompts get one
_FEWEST_TOKENS = 4  # of a shared step: fewer would read all weights for next to nothing
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


def burst_tokens(budget: int, bound: int) -> int:
    """A prompt of so many tokens is short: it may be computed in one step."""
    return min(budget, max(bound * _BURST, _BURST_TOKENS))


def by_share(
    wants: ListLike[Want], budget: int, bound: int, now_s: float, about: ListLike[Tenant] = ()
) -> list[int]:
    """Several tenants: short prompts at once, and about `bound` tokens of the others, split evenly between the
    tenants that want them; one that was served clearly less in the last seconds gets more. Within a tenant the
    given order holds, and more important sequences go before all that. `about`: all tenants, also those who want
    nothing now."""
    given = [0] * len(wants)
    for priority in sorted({want.priority for want in wants}):
        level = [index for index, want in enumerate(wants) if want.priority == priority]
        demand: dict[Tenant, int] = {}
        for index in level:
            demand[wants[index].tenant] = demand.get(wants[index].tenant, 0) + wants[index].tokens
        spent = sum(given)
        quota = _quotas(demand, max(0, bound - spent), budget - spent, now_s, about)
        for index in level:
            tenant = wants[index].tenant
            given[index] = min(wants[index].tokens, quota[tenant])
            quota[tenant] -= given[index]
    return given


def _quotas(
    demand: dict[Tenant, int], bound: int, budget: int, now_s: float, about: ListLike[Tenant]
) -> dict[Tenant, int]:
    """What each tenant may have of a step, never more than it wants."""
    resting = max((one.recent(now_s) for one in about if one not in demand), default=None)
    recent = {tenant: tenant.recent(now_s) for tenant in demand}
    quota: dict[Tenant, int] = {}
    burst = burst_tokens(budget, bound) if bound else 0
    for tenant in sorted(demand, key=lambda one: (recent[one], demand[one])):
        others = [served for one, served in recent.items() if one is not tenant]
        best = max(others if resting is None else [*others, resting], default=math.inf)
        is_short = demand[tenant] <= burst and recent[tenant] <= _STILL_FAIR * best
        if is_short or (not quota and others and recent[tenant] <= _CLEARLY_LESS * min(others)):
            quota[tenant] = min(demand[tenant], burst)
            burst -= quota[tenant]
    spent = sum(quota.values())
    rest = sorted((tenant for tenant in demand if tenant not in quota), key=lambda one: demand[one])
    left = min(max(bound - spent, bound // _TRICKLE), budget - spent)
    for position, tenant in enumerate(rest):  # the smallest first: what it leaves is the others'
        quota[tenant] = min(demand[tenant], -(-left // (len(rest) - position)))
        left -= quota[tenant]
    return quota
