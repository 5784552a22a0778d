"""SchedulerConfig: the limits the scheduler decides under. Made for the engine and for the simulator alike."""

from dataclasses import dataclass
from typing import Literal

from cumulo.engine.config import EngineConfig
from cumulo.engine.memory.memory_plan import MemoryPlan
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
    # Which drafts: by lookup, of a model, or of a head that a GPU asks by itself, in rounds.
    speculate: Literal["", "ngram", "model", "rounds"] = ""
    draft_tree: int = 0  # levels of the trees that such a head may grow; 0: chains only
    # Of a pipeline. A sequence whose next token is still being drawn would hold up all stages, so it waits, and a
    # step takes its share of those that do not.
    stages: int = 1
    # Of the blocks, with data-parallel attention: equal runs of them, each on one rank with its sequences.
    homes: int = 1
    slo: Slo | None = None  # promised to requests that do not name their own
    late: Literal["refuse", "queue"] = "refuse"  # requests whose promise cannot be kept

    def __post_init__(self) -> None:
        if self.max_tokens_per_step < self.max_running:
            raise CumuloError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least max_running "
                f"({self.max_running}): every running sequence gets its next token in every step"
            )
        if self.blocks % self.homes:
            raise CumuloError(f"{self.blocks} KV blocks cannot be shared evenly by dp {self.homes}")
        if self.speculate and self.stages > 1:
            raise CumuloError(
                "speculate needs pp 1: a pipeline's stages never wait for drawn tokens; omit one"
            )
        if self.homes > 1 and self.host_blocks:
            raise CumuloError(
                "swap_gib needs dp 1: with data-parallel attention preemption recomputes; omit it"
            )
        if self.homes > 1 and self.tier_blocks:
            raise CumuloError("kv_host_gib and kv_disk need dp 1, without data-parallel attention; omit them")
        if not self.shared_step_s > 0:
            raise CumuloError(f"shared_step_s must be more than 0 seconds, got {self.shared_step_s}")


def scheduler_config(config: EngineConfig, memory: MemoryPlan) -> SchedulerConfig:
    """From the engine's options, settled for its device, and what the memory ledger gives it."""
    return SchedulerConfig(
        blocks=memory.kv_blocks,
        block_size=config.block_size,
        max_context=memory.max_context,
        max_running=config.max_running,
        max_tokens_per_step=config.max_tokens_per_step,
        prefix_cache=config.prefix_cache,
        preemption=config.preemption,
        host_blocks=memory.host_blocks,
        tier_blocks=memory.tier_blocks,
        disk=bool(config.kv_disk),
        priority_step_s=config.priority_step_s,
        shared_step_s=config.shared_step_s,
        speculate=_drafts(config),
        draft_tree=config.draft_tree,
        stages=config.pp,
        homes=config.dp,
        slo=config.slo,
        late=config.slo_late,
    )


def _drafts(config: EngineConfig) -> Literal["", "ngram", "model", "rounds"]:
    if config.speculate in ("", "ngram"):
        return "ngram" if config.speculate else ""
    return "rounds" if config.device == "cuda" else "model"
