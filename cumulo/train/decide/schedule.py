"""The learning rate over a run, as a share of its highest value. Pure; the trainer asks before each step."""

import math

from cumulo.train.decide.config import ScheduleConfig


def learning_rate_share(config: ScheduleConfig, step: int, steps: int) -> float:
    """For step 0 to steps - 1: up in a line, then as the kind says, ending at `final_share`."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    if config.kind == "cosine":  # Loshchilov & Hutter 2017, equation 5, without restarts
        done = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
        return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * done))
    # warm-up-stable-decay (Hu et al. 2024, section 4.2), the decay in a line
    decay_steps = max(1, round(steps * config.decay_share))
    left = min(1.0, (steps - 1 - step) / decay_steps)
    return config.final_share + (1 - config.final_share) * left
