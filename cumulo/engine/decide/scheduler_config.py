"""SchedulerConfig: the limits the scheduler decides under. Made from EngineConfig and the memory plan."""

from dataclasses import dataclass
from typing import Literal

from cumulo.errors import CumuloError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    blocks: int
    block_size: int = 16
    max_context: int
    max_running: int = 256
    max_tokens_per_step: int = 512
    prefix_cache: bool = True
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    host_blocks: int = 0
    priority_step_s: float = 30.0
    shared_step_s: float = 0.04

    def __post_init__(self) -> None:
        if self.max_tokens_per_step < self.max_running:
            raise CumuloError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least max_running "
                f"({self.max_running}): every running sequence gets its next token in every step"
            )
        if not self.shared_step_s > 0:
            raise CumuloError(f"shared_step_s must be more than 0 seconds, got {self.shared_step_s}")
