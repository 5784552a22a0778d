"""StagePlacement: which stage of a pipeline holds which chunks of the model. Schedules and layouts ask."""

from enum import StrEnum
from functools import cache


class StagePlacement(StrEnum):
    LOOP = "loop"  # chunk c on stage c mod p: round and round
    V = "v"  # chunks 0 … p-1 down the stages, p … 2p-1 back up: stage 0 has the first and the last
    # Two copies of the model, in opposite directions: chunk c of direction 0 on stage c, of direction 1 on p-1-c.
    BIDIRECTIONAL = "bidirectional"

    @property
    def directions(self) -> int:
        return 2 if self is StagePlacement.BIDIRECTIONAL else 1

    def chunks(self, stages: int, chunks_per_stage: int) -> int:
        """Chunks a micro-batch passes. A bidirectional pipeline has each of them twice, once for each direction."""
        return stages * chunks_per_stage // self.directions

    def stage_of(self, stages: int, chunk: int, direction: int = 0) -> int:
        lap, position = divmod(chunk, stages)
        backwards = (
            direction if self is StagePlacement.BIDIRECTIONAL else self is StagePlacement.V and lap % 2
        )
        return stages - 1 - position if backwards else position

    @cache
    def held_by(self, stage: int, stages: int, chunks_per_stage: int) -> tuple[tuple[int, int], ...]:
        """The (chunk, direction) pairs of a stage; direction 1 is the second copy of a bidirectional pipeline."""
        return tuple(
            (chunk, direction)
            for direction in range(self.directions)
            for chunk in range(self.chunks(stages, chunks_per_stage))
            if self.stage_of(stages, chunk, direction) == stage
        )
