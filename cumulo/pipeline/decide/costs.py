"""Costs: how long actions and messages take. The simulator is given one; calibration or a guess makes it."""

import math
from dataclasses import dataclass

from cumulo.errors import InvalidRequest
from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Seconds one micro-batch takes on one chunk. The default, 1 each, is the papers' unit cost."""

    forward_s: float = 1.0
    backward_input_s: float = 1.0
    backward_weight_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_input_s", "backward_weight_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidRequest(f"{name} must be a time of 0 or more seconds, got {value}")

    @property
    def backward_s(self) -> float:
        return self.backward_input_s + self.backward_weight_s

    def seconds_of(self, kind: Kind) -> float:
        if kind is Kind.FORWARD:
            return self.forward_s
        if kind is Kind.BACKWARD:
            return self.backward_s
        return self.backward_input_s if kind is Kind.BACKWARD_INPUT else self.backward_weight_s


@dataclass(frozen=True, slots=True)
class Link:
    """Between two stages, in each direction: messages pass one after another."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise InvalidRequest(f"a link's latency must be 0 or more seconds, got {self.latency_s}")
        if not self.bytes_per_s > 0:
            raise InvalidRequest(f"a link's bandwidth must be more than 0 bytes/s, got {self.bytes_per_s}")


@dataclass(frozen=True)
class Costs:
    """Durations of everything in a schedule."""

    chunks: tuple[ChunkCost, ...] = (ChunkCost(),)  # of each chunk; a single one is for all
    overlap_saving: float = 0.0  # share of F + B saved where the two overlap: their communication
    link: Link = Link()
    message_bytes: float = 0.0  # an activation or a gradient of one micro-batch between two chunks

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_saving < 1:
            raise InvalidRequest(f"the share an overlap saves must be in [0, 1), got {self.overlap_saving}")
        if not (math.isfinite(self.message_bytes) and self.message_bytes >= 0):
            raise InvalidRequest(f"a message must have 0 or more bytes, got {self.message_bytes}")

    @staticmethod
    def of_stage(
        schedule: PipelineSchedule,
        forward_s: float = 1.0,
        backward_input_s: float = 1.0,
        backward_weight_s: float = 1.0,
    ) -> "Costs":
        """From what 1/stages of the model takes, however the schedule cuts it: for comparing schedules."""
        share = schedule.stages / schedule.chunks
        return Costs((ChunkCost(forward_s * share, backward_input_s * share, backward_weight_s * share),))

    def check_fits(self, schedule: PipelineSchedule) -> None:
        if len(self.chunks) not in (1, schedule.chunks):
            raise InvalidRequest(
                f"{len(self.chunks)} chunk costs for a schedule of {schedule.chunks} chunks: "
                "give one for all or one for each"
            )

    def chunk(self, chunk: int) -> ChunkCost:
        return self.chunks[chunk if len(self.chunks) > 1 else 0]

    def block_s(self, block: tuple[Action, ...]) -> float:
        """How long actions take that start together: the sum, less what overlapping saves."""
        total = sum(self.chunk(action.chunk).seconds_of(action.kind) for action in block)
        return total * (1 - self.overlap_saving if len(block) > 1 else 1)

    @property
    def transfer_s(self) -> float:
        """How long a message occupies its link."""
        return self.message_bytes / self.link.bytes_per_s
