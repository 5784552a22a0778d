"""Every schedule by name, with its properties, what it asks for and what its paper promises. The command, the
trainer and the planner build schedules here, and ask a `Family` what they must know of one.

    schedule = build("zb-v", stages=8, micro_batches=32)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from cumulo.base.nearest import did_you_mean
from cumulo.errors import InvalidRequest
from cumulo.pipeline.decide import formulas
from cumulo.pipeline.decide.actions import PipelineSchedule, StagePlacement
from cumulo.pipeline.decide.order import (
    StageOrder,
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)

Generator = Callable[[int, int, int, int], StageOrder]  # (stage, stages, micro-batches, chunks per stage)


@dataclass(frozen=True)
class Family:
    """One way to schedule a pipeline. A new one is added to `FAMILIES`, and everything here knows it."""

    name: str
    title: str
    paper: str
    stage_order: Generator
    formula: formulas.Formula
    placement: StagePlacement = StagePlacement.LOOP
    chunks_per_stage: int = 1  # the default, and the only choice unless `any_chunks`
    any_chunks: bool = False
    even_stages: bool = False
    even_micro_batches: bool = False
    micro_batches_per_stage: int = 0  # at least this many micro-batches for each stage
    splits_backward: bool = False  # gradients of weights have places of their own, after those of inputs
    overlaps: bool = False  # forwards run together with backwards
    # When `stages` micro-batches more repeat the order's middle and change nothing else.
    repeats: Literal["never", "in whole rounds", "always"] = "never"
    # Another schedule is always at least as good, so that a search leaves this one out.
    never_best: bool = False

    @property
    def bidirectional(self) -> bool:
        """Whether micro-batches enter at both ends, into two copies of the model."""
        return self.placement is StagePlacement.BIDIRECTIONAL

    def has_steady_part(self, stages: int, micro_batches: int) -> bool:
        """Whether a long step is a short one whose middle is repeated."""
        return self.repeats == "always" or (self.repeats == "in whole rounds" and micro_batches % stages == 0)

    def refusal(self, stages: int, micro_batches: int, chunks_per_stage: int) -> str | None:
        """Why this combination cannot be scheduled and what to change; None: it can."""
        asked = f"{self.name} with {stages} stages and {micro_batches} micro-batches"
        if stages < 1 or micro_batches < 1:
            return f"{asked}: both must be 1 or more"
        if self.any_chunks and chunks_per_stage < 2:
            return (
                f"{self.name} needs 2 or more chunks per stage, got {chunks_per_stage}; with one it is 1f1b"
            )
        if not self.any_chunks and chunks_per_stage != self.chunks_per_stage:
            return (
                f"{self.name} has {self.chunks_per_stage} chunk(s) per stage, not {chunks_per_stage}; "
                "leave the number out, or use interleaved-1f1b"
            )
        if self.even_stages and stages % 2:
            return f"{asked}: the stages must be even, because they work in mirrored pairs; use {stages + 1}"
        if self.even_micro_batches and micro_batches % 2:
            return f"{asked}: half of the micro-batches comes from each end; use {micro_batches + 1}"
        least = self.micro_batches_per_stage * stages
        if micro_batches < least:
            return f"{asked}: too few to reach the overlapped part; use {least} or more, or zb-v"
        return None

    def schedule(self, stages: int, micro_batches: int, chunks_per_stage: int) -> PipelineSchedule:
        """The compute actions of all stages; `refusal` says for which numbers."""
        sizes = (stages, micro_batches, chunks_per_stage)
        orders = tuple(tuple(self.stage_order(stage, *sizes).actions) for stage in range(stages))
        return PipelineSchedule(self.name, *sizes, self.placement, orders)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "gpipe",
            "all forwards, then all backwards",
            "Huang et al. 2019",
            gpipe,
            formulas.GPIPE,
            never_best=True,  # 1f1b takes as long and holds less
        ),
        Family(
            "1f1b",
            "one forward, one backward in turn",
            "Narayanan et al. 2021 (PipeDream-flush)",
            one_f_one_b,
            formulas.ONE_F_ONE_B,
            repeats="always",
        ),
        Family(
            "interleaved-1f1b",
            "1F1B over several chunks per stage",
            "Narayanan et al. 2021 (Megatron-LM)",
            interleaved,
            formulas.INTERLEAVED,
            chunks_per_stage=2,
            any_chunks=True,
            repeats="in whole rounds",
        ),
        Family(
            "zb-h1",
            "1F1B with weight gradients in the bubble",
            "Qi et al. 2023",
            zero_bubble_h1,
            formulas.ZERO_BUBBLE_H1,
            splits_backward=True,
            repeats="always",
        ),
        Family(
            "zb-v",
            "two chunks per stage in a V, no bubble inside a stage",
            "Qi et al. 2023, section 6",
            zero_bubble_v,
            formulas.ZERO_BUBBLE_V,
            StagePlacement.V,
            chunks_per_stage=2,
            splits_backward=True,
            repeats="always",
        ),
        Family(
            "dualpipe",
            "from both ends at once, over two copies of the weights",
            "DeepSeek-AI 2024",
            dualpipe,
            formulas.DUALPIPE,
            StagePlacement.BIDIRECTIONAL,
            chunks_per_stage=2,
            even_stages=True,
            even_micro_batches=True,
            micro_batches_per_stage=2,
            splits_backward=True,
            overlaps=True,
            repeats="always",
        ),
        Family(
            "dualpipe-v",
            "DualPipe folded into a V, one copy of the weights",
            "DeepSeek-AI 2025",
            dualpipe_v,
            formulas.DUALPIPE_V,
            StagePlacement.V,
            chunks_per_stage=2,
            micro_batches_per_stage=2,
            splits_backward=True,
            overlaps=True,
            repeats="always",
        ),
    )
}


def family(name: str) -> Family:
    """The schedule of that name."""
    found = FAMILIES.get(name) or FAMILIES.get(name.lower().replace("_", "-"))
    if found is None:
        hint = did_you_mean(name.lower(), FAMILIES, otherwise=".")
        raise InvalidRequest(f"there is no schedule {name!r}{hint} There are: {', '.join(FAMILIES)}")
    return found


@lru_cache(128)
def build(
    name: str, stages: int, micro_batches: int, chunks_per_stage: int | None = None
) -> PipelineSchedule:
    """The schedule of that name (compute actions only), or a refusal that says what to change."""
    chosen = family(name)
    chunks = chosen.chunks_per_stage if chunks_per_stage is None else chunks_per_stage
    if (refusal := chosen.refusal(stages, micro_batches, chunks)) is not None:
        raise InvalidRequest(refusal)
    return chosen.schedule(stages, micro_batches, chunks)
