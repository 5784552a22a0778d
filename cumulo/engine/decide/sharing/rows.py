"""Decode shares: which sequences draw a token in a step, while several tenants are about. Asked by
steps.py.

A step takes as long as its rows, and a newcomer waits for the step that runs. So a step's rows are bounded by time:
tenants with few sequences draw with all of them, and the sequences of one with many take turns. In a step that
computes a short prompt, tenants that were served as much or more draw with one sequence each: they lose nothing by
it, because the rows left out would have made that step longer, and come right after it.
"""

from collections.abc import Sequence as ListLike
from operator import attrgetter

from cumulo.engine.decide.core.request import Sequence
from cumulo.engine.decide.sharing.tenants import Tenant

_LEARN = 0.5  # share of the news in the average: steps that took longer than expected,
_LEARN_LESS = 0.2  # ... and others
_MOST_LONGER = (
    4.0  # times as expected: a machine that stood still for a while says nothing about the next step
)
_by_last_step = attrgetter("last_step")


class StepPace:
    """How long a step's rows and prompt tokens take. Measured by the engine while it runs."""

    def __init__(self, shared_step_s: float) -> None:
        self.shared_step_s = shared_step_s
        self.s_per_row = shared_step_s / 4  # before the first steps: what many would take is not known
        self.s_per_prompt_token = 1e-3

    def observe(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step with so many single tokens and tokens of prompts."""
        if not prompt_tokens:
            self._observe_rows(seconds / rows, seconds)
            return
        if rows:
            self.s_per_row = min(self.s_per_row, seconds / rows)
        # A step's fixed part is among what its rows take; half of the time per token is the prompt's in any case.
        left_s = max(seconds - rows * self.s_per_row, seconds / 2 * prompt_tokens / (rows + prompt_tokens))
        measured = min(left_s / prompt_tokens, _MOST_LONGER * self.s_per_prompt_token)
        learn = _LEARN if measured > self.s_per_prompt_token else _LEARN_LESS
        self.s_per_prompt_token += learn * (measured - self.s_per_prompt_token)

    def _observe_rows(self, measured: float, seconds: float) -> None:
        """A step has a fixed part, so a short one with few rows says little about what more rows would take: only
        steps that are too long raise the estimate."""
        if measured < self.s_per_row:
            self.s_per_row = max(measured, 1e-9)
        elif seconds > self.shared_step_s:
            self.s_per_row += _LEARN * (min(measured, _MOST_LONGER * self.s_per_row) - self.s_per_row)

    def rows_in(self, seconds: float) -> int:
        return max(1, int(seconds / self.s_per_row))


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
    """Of the sequences that could draw a token, those that wait for a later step. `newcomer`: the tenant
    whose short prompt is computed in this step."""
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
