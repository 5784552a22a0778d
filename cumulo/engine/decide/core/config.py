"""SchedulerConfig: the limits the scheduler decides under. Made for the engine and for the simulator alike."""

from dataclasses import dataclass
from typing import Literal

from cumulo.errors import CumuloError
from cumulo.spec.slo import Slo


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
    tier_blocks: int = 0  # further ones, for prefixes that leave the device
    disk: bool = False  # from where they are written to files, and read
    priority_step_s: float = 30.0
    shared_step_s: float = 0.04
    max_loras: int = 0  # low-rank adapters that can be loaded at the same time
    # Which drafts: by lookup, of a model, or of a head that a GPU asks by itself, in rounds.
    speculate: Literal["", "ngram", "model", "rounds"] = ""
    draft_tree: int = 0  # levels of the trees that such a head may grow; 0: chains only
    # Of a pipeline. A sequence whose next token is still being drawn would hold up all stages, so it waits, and a
    # step takes its share of those that do not.
    stages: int = 1
    # Data-parallel attention: the blocks are equal runs of them, each on one rank with its sequences.
    dp: int = 1
    slo: Slo | None = None  # promised to requests that do not name their own
    late: Literal["refuse", "queue"] = "refuse"  # requests whose promise cannot be kept

    def __post_init__(self) -> None:
        if self.max_tokens_per_step < self.max_running:
            raise CumuloError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least max_running "
                f"({self.max_running}): every running sequence gets its next token in every step"
            )
        if self.blocks % self.dp:
            raise CumuloError(f"{self.blocks} KV blocks cannot be shared evenly by dp {self.dp}")
        if self.speculate and self.stages > 1:
            raise CumuloError(
                "speculate needs pp 1: a pipeline's stages never wait for drawn tokens; omit one"
            )
        if self.dp > 1 and self.host_blocks:
            raise CumuloError(
                "swap_gib needs dp 1: with data-parallel attention preemption recomputes; omit it"
            )
        if self.dp > 1 and self.tier_blocks:
            raise CumuloError("kv_host_gib and kv_disk need dp 1, without data-parallel attention; omit them")
        if not self.shared_step_s > 0:
            raise CumuloError(f"shared_step_s must be more than 0 seconds, got {self.shared_step_s}")
