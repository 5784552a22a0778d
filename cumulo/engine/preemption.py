"""How a sequence gives way when KV blocks run out: recompute it later, or swap its blocks to host memory."""

from dataclasses import dataclass
from typing import Literal

Way = Literal["recompute", "swap"]


@dataclass(slots=True)
class PreemptionCosts:
    """Measured by the engine while it runs; the starting values only matter before the first step."""

    recompute_s_per_token: float = 1e-3
    swap_s_per_block: float = 1e-4

    def observe_compute(self, tokens: int, rows: int, seconds: float) -> None:
        """Learn from a step that was mostly prefill: decode steps read all weights for few tokens."""
        if tokens >= max(16, 4 * rows) and seconds > 0:
            self.recompute_s_per_token += 0.2 * (seconds / tokens - self.recompute_s_per_token)


@dataclass(frozen=True, slots=True)
class PreemptionChoice:
    way: Way
    recompute_s: float
    swap_s: float
    why: str


def choose_preemption(
    *,
    computed_tokens: int,
    blocks: int,
    host_blocks_free: int,
    mode: Literal["auto", "recompute", "swap"],
    costs: PreemptionCosts,
) -> PreemptionChoice:
    """Swapping moves every block twice; recomputing pays for every token again."""
    recompute_s = computed_tokens * costs.recompute_s_per_token
    swap_s = 2 * blocks * costs.swap_s_per_block
    if mode == "recompute":
        way, why = "recompute", "recomputed later (configured)"
    elif host_blocks_free < blocks:
        way, why = "recompute", f"recomputed later: host memory has room for {host_blocks_free} blocks"
    elif mode == "swap":
        way, why = "swap", "swapped to host memory (configured)"
    elif swap_s < recompute_s:
        way, why = (
            "swap",
            f"swapped to host memory ({swap_s * 1e3:.2g} ms against {recompute_s * 1e3:.2g} ms)",
        )
    else:
        way, why = "recompute", f"recomputed later ({recompute_s * 1e3:.2g} ms against {swap_s * 1e3:.2g} ms)"
    return PreemptionChoice("swap" if way == "swap" else "recompute", recompute_s, swap_s, why)
