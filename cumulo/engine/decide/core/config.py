"""SchedulerConfig: the limits the scheduler decides under. Made for the engine and for the simulator alike."""

from dataclasses import dataclass
from typing import Literal

from cumulo.errors import CumuloError, require_least
from cumulo.spec.slo import Slo

# What 0 stands for, by kind of device.
DEVICE_DEFAULTS = {
    "cpu": {"block_size": 16, "max_running": 256, "max_tokens_per_step": 512},
    "cuda": {"block_size": 64, "max_running": 512, "max_tokens_per_step": 8192},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How much is computed together. Engines, plans and plan files have these limits from here."""

    max_running: int = 0  # sequences that compute at the same time; 0: 256 on a CPU, 512 on a GPU
    max_tokens_per_step: int = 0  # shared by prefill chunks and decodes; 0: 512 on a CPU, 8192 on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions(BatchLimits):
    """The options of an engine that its scheduler decides by. EngineConfig and SchedulerConfig have them from
    here."""

    # Tokens per KV block; 0: 16 on a CPU, 64 on a GPU, where a block is one tile of attention.
    block_size: int = 0
    prefix_cache: bool = True
    priority_step_s: float = 30.0  # a request one priority lower overtakes those that came this much later
    # While several tenants (API keys) are about, a step takes about this long, and twice as long while one key is
    # alone: a newcomer waits for no step that another has filled
    shared_step_s: float = 0.04
    # TTFT and ITL promised to requests that do not ask for their own; None: nothing is promised (docs/slo.md)
    slo: Slo | None = None
    # What becomes of a request whose promise cannot be kept; queue: it is answered without a promise
    slo_late: Literal["refuse", "queue"] = "refuse"
    max_loras: int = 0  # low-rank adapters that can be loaded at the same time; 0: none are served
    pp: int = 1  # pipeline parallel: layers in this many stages
    dp: int = 1  # data-parallel attention: each sequence's KV cache on one of this many ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulingOptions):
    blocks: int
    max_context: int
    tier_blocks: int = 0  # of host memory, for KV that leaves the device
    disk: bool = False  # from where they are written to files, and read
    # Which drafts: by lookup, of a model, or of a head that a GPU asks by itself, in rounds.
    speculate: Literal["", "ngram", "model", "rounds"] = ""

    def __post_init__(self) -> None:
        for name, value in DEVICE_DEFAULTS["cpu"].items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.max_tokens_per_step < self.max_running:
            raise CumuloError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least max_running "
                f"({self.max_running}): every running sequence gets its next token in every step"
            )
        if self.blocks % self.dp:
            raise CumuloError(f"{self.blocks} KV blocks cannot be shared evenly by dp {self.dp}")
        if self.speculate and self.pp > 1:
            raise CumuloError(
                "speculate needs pp 1: a pipeline's stages never wait for drawn tokens; omit one"
            )
        if self.dp > 1 and self.tier_blocks:
            raise CumuloError("kv_host_gib and kv_disk need dp 1, without data-parallel attention; omit them")
        require_least(self, 0, "shared_step_s", above=True, unit=" seconds")
