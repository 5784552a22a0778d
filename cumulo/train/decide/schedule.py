"""The learning rate over a run, as a share of its highest value. Pure; the trainer asks before each step."""

import math
from collections import deque

from cumulo.train.decide.config import GuardConfig, ScheduleConfig


def learning_rate_share(config: ScheduleConfig, step: int, steps: int) -> float:
    """For step 0 to steps - 1: up in a line, then as the kind says, down to `final_share`, which the step after the
    last would have."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    if config.kind == "cosine":  # Loshchilov & Hutter 2017, equation 5, without restarts
        done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * done))
    # warm-up-stable-decay (Hu et al. 2024, section 4.2), the decay in a line
    decay_steps = max(1, round(steps * config.decay_share))
    left = min(1.0, (steps - step) / (decay_steps + 1))
    return config.final_share + (1 - config.final_share) * left


_LEAST_STEPS = 20  # before a deviation means anything
_LEAST_DEVIATION = 0.02  # of the mean: a loss that has become very steady is not a reason to stop at a ripple


class SpikeGuard:
    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.window_steps)

    def complaint(self, loss: float, gradient_norm: float) -> str | None:
        """What is wrong with this step, or None; a healthy loss is remembered."""
        if not math.isfinite(loss) or not math.isfinite(gradient_norm):
            return f"the loss is {loss} and the gradients' norm {gradient_norm}"
        if self.config.spike_deviations and len(self.losses) >= min(_LEAST_STEPS, self.config.window_steps):
            mean = sum(self.losses) / len(self.losses)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in self.losses) / len(self.losses))
            bound = mean + self.config.spike_deviations * max(deviation, _LEAST_DEVIATION * abs(mean))
            if loss > bound:
                return f"the loss jumped to {loss:.4f}, above {bound:.4f} (mean of recent steps {mean:.4f})"
        self.losses.append(loss)
        return None
