"""StepCost: how long the rows and the prompt tokens of a step take, learnt from the steps that were played.
Owned by the batch; preemption, sharing, tiers, transfers and routers ask it.
"""

_LEARN = 0.5  # share of the news in the average: steps that took longer than expected,
_LEARN_LESS = 0.2  # ... and others
_MOST_LONGER = (
    4.0  # times as expected: a machine that stood still for a while says nothing about the next step
)


class StepCost:
    def __init__(self, shared_step_s: float = 0.04) -> None:
        self.shared_step_s = shared_step_s
        self.swap_s_per_block = 1e-4  # between the device and host memory; measured by the assembly
        self.forget()

    def forget(self) -> None:
        """Nothing is known of steps, as at the beginning."""
        self.s_per_row = self.shared_step_s / 4  # what many rows would take is not known
        self.prompt_s_per_token = 1e-3
        self.knows_prompts = False  # whether a step with prompts was measured

    def observe(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step with so many single tokens and tokens of prompts."""
        if rows + prompt_tokens == 0 or seconds <= 0:
            return
        if not prompt_tokens:
            self._observe_rows(seconds / rows, seconds)
            return
        self.knows_prompts = True
        if rows:
            self.s_per_row = min(self.s_per_row, seconds / rows)
        # A step's fixed part is among what its rows take; half of the time per token is the prompt's in any case.
        left_s = max(seconds - rows * self.s_per_row, seconds / 2 * prompt_tokens / (rows + prompt_tokens))
        measured = min(left_s / prompt_tokens, _MOST_LONGER * self.prompt_s_per_token)
        learn = _LEARN if measured > self.prompt_s_per_token else _LEARN_LESS
        self.prompt_s_per_token += learn * (measured - self.prompt_s_per_token)

    def _observe_rows(self, measured: float, seconds: float) -> None:
        """A step has a fixed part, so a short one with few rows says little about what more rows would take: only
        steps that are too long raise the estimate."""
        if measured < self.s_per_row:
            self.s_per_row = max(measured, 1e-9)
        elif seconds > self.shared_step_s:
            self.s_per_row += _LEARN * (min(measured, _MOST_LONGER * self.s_per_row) - self.s_per_row)

    def rows_in(self, seconds: float) -> int:
        return max(1, int(seconds / self.s_per_row))

    def expected_s(self, rows: int, prompt_tokens: int) -> float:
        """How long a step of so many single tokens and tokens of prompts takes."""
        return self.s_per_row * rows + self.prompt_s_per_token * prompt_tokens
