"""Decode shares: which sequences draw a token in a step, while several tenants are about. Asked by the scheduler.

A step takes as long as its rows, and a newcomer waits for the step that runs. While one tenant is here alone,
every sequence draws a token in every step. Once a second tenant is about, a step's rows are bounded by time
(`shared_step_s`): tenants with few sequences draw with all of them, and the sequences of one with many take
turns. In a step that computes a short prompt, tenants that were served as much or more draw with one sequence
each: they lose nothing by it, because the rows left out would have made that step longer, and come right after it.
"""

from collections.abc import Sequence as ListLike
from operator import attrgetter

from cumulo.engine.decide.fairness import Tenant
from cumulo.engine.decide.request import Sequence

_LEARN = 0.2  # share of the news in the average
_by_last_step = attrgetter("last_step")


class DecodePace:
    """How many rows a step of single tokens may have. Measured by the engine while it runs."""

    def __init__(self, shared_step_s: float) -> None:
        self.shared_step_s = shared_step_s
        self.s_per_row = 1e-3  # only matters before the first step

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn from a step. It has a fixed part, so a short one with few rows says little about what more rows
        would take: only steps that are too long raise the estimate. Prompts are computed faster than single
        tokens: they never lower it."""
        measured = seconds / tokens
        if measured < self.s_per_row:
            if tokens == rows:
                self.s_per_row = max(measured, 1e-9)
        elif seconds > self.shared_step_s:
            self.s_per_row += _LEARN * (measured - self.s_per_row)

    @property
    def rows(self) -> int:
        return max(1, int(self.shared_step_s / self.s_per_row))


def decoding(running: ListLike[Sequence]) -> list[Sequence]:
    """Those whose next token needs one row."""
    return [
        one
        for one in running
        if one.prompt_length <= one.computed == len(one.tokens) + one.pending - 1 < one.limit - 1
    ]


def rows_to_leave_out(
    ready: ListLike[Sequence], bound: int, newcomer: Tenant | None, now_s: float
) -> list[Sequence]:
    """Of the sequences that could draw a token, those that wait for a later step. `newcomer`: the tenant served
    least whose short prompt is computed in this step."""
    by_tenant: dict[Tenant, list[Sequence]] = {}
    for sequence in ready:
        by_tenant.setdefault(sequence.request.share, []).append(sequence)
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
