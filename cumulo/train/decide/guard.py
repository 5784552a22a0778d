"""SpikeGuard: notices a loss that is no number or jumps. The trainer asks it before a step's gradients are used."""

import math
from collections import deque

from cumulo.train.decide.config import GuardConfig

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
