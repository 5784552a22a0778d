"""EngineConfig: every option of the engine, documented where it is defined. No environment switches."""

from dataclasses import dataclass
from typing import Literal

from cumulo.errors import CumuloError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    block_size: int = 16  # tokens per KV block
    kv_blocks: int | None = None  # None: as many as kv_memory_gib holds
    kv_memory_gib: float | None = None  # None: chosen by the memory ledger from what is free
    max_context: int | None = None  # longest prompt + output; None: what the model was trained for
    max_running: int = 256  # sequences that compute at the same time
    max_tokens_per_step: int = 512  # the step's token budget, shared by prefill chunks and decodes
    prefix_cache: bool = True
    preemption: Literal["auto", "recompute", "swap"] = "auto"  # auto: whichever is predicted cheaper
    swap_gib: float = 0.0  # host memory for swapped-out blocks; 0: preemption always recomputes
    priority_step_s: float = 30.0  # a request one priority lower overtakes those that came this much later
    overlap: bool = True  # plan step N+1 and finish N-1 while N runs
    threads: int | None = None  # CPU threads; None: torch's default
    dtype: str = "auto"  # of activations and KV; auto: float32 on a CPU
    seed: int = 0  # where requests without a seed of their own draw theirs

    def __post_init__(self) -> None:
        for name in ("block_size", "max_running", "max_tokens_per_step"):
            if getattr(self, name) < 1:
                raise CumuloError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.kv_blocks is not None and self.kv_blocks < 1:
            raise CumuloError(f"kv_blocks must be 1 or more, got {self.kv_blocks}")
