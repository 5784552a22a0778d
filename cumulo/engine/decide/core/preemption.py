"""Preemption: who gives way when room is short, and how: recomputed later, or swapped to host memory.

Asked by admission (who) and by the KVManager (how).
"""

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from typing import Literal

from cumulo.engine.decide.core.request import Sequence, State
from cumulo.engine.decide.core.step_cost import StepCost

Way = Literal["recompute", "swap"]


def younger(sequence: Sequence, running: ListLike[Sequence], step: int) -> Iterator[Sequence]:
    """Who may give a block to this sequence, the youngest first: only younger ones, so that the oldest always gets
    on, and none that is in this step already. `running` is in order, oldest first."""
    for other in reversed(running):
        if other.request.order < sequence.request.order:
            return
        if other.state != State.RUNNING or other.last_step == step or other is sequence:
            continue
        if not other.request.prefill_only:  # its blocks are the receiver's, too: it would not free them
            yield other


def less_important(head: Sequence, running: ListLike[Sequence], level: int) -> list[Sequence]:
    """Who may have to give way to the first in the queue, the youngest first. Beyond the level whose turn it is and
    younger in order: any other would only come straight back."""
    order = head.request.order
    return [
        s
        for s in reversed(running)
        if s.request.priority > level and s.request.order > order and not s.request.prefill_only
    ]


def choose_preemption(
    *,
    computed_tokens: int,
    blocks: int,
    host_blocks_free: int,
    mode: Literal["auto", "recompute", "swap"],
    costs: StepCost,
) -> tuple[Way, str]:
    """How a sequence gives way, also in words. Swapping moves every block twice; recomputing pays for every token
    again."""
    recompute_s = computed_tokens * costs.prompt_s_per_token
    swap_s = 2 * blocks * costs.swap_s_per_block
    if mode == "recompute":
        return "recompute", "recomputed later (configured)"
    if host_blocks_free < blocks:
        return "recompute", f"recomputed later: host memory has room for {host_blocks_free} blocks"
    if mode == "swap":
        return "swap", "swapped to host memory (configured)"
    if swap_s < recompute_s:
        return "swap", f"swapped to host memory ({swap_s * 1e3:.2g} ms against {recompute_s * 1e3:.2g} ms)"
    return "recompute", f"recomputed later ({recompute_s * 1e3:.2g} ms against {swap_s * 1e3:.2g} ms)"
