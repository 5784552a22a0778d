"""A rank's chunks as the pipeline plays them: a layout's schedules, and a chunk with its part of the objective.
Called by `cumulo.train.run.model_run`."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn

from cumulo.layout.layout import Layout, chunks_per_stage, held_chunks, stage_placement
from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule, Sends
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.check import check
from cumulo.pipeline.decide.communication import with_communication
from cumulo.train.data.packing import DeviceBatch
from cumulo.train.model.model import TrainingDecoder


class ChunkLoss:
    """A chunk of the model as the pipeline plays it: its share of the objective, and sums to report."""

    def __init__(
        self,
        model: TrainingDecoder,
        leaves: Callable[[], Iterator[nn.Parameter]],
        loss_tokens: int,
        balance_weight: float,
    ) -> None:
        """`leaves`: what backward gives gradients to; under ZeRO 3 the model itself has not got them then."""
        self.model, self.loss_tokens, self.balance_weight = model, loss_tokens, balance_weight
        self._leaves = leaves
        self._tokens: list[Tensor] = []
        self._balances: list[Tensor] = []

    def __call__(self, x: Tensor | None, micro_batch: DeviceBatch) -> tuple[Tensor | None, Tensor | None]:
        losses = self.model(micro_batch, x)
        objective = None
        if self.model.part.last:
            self._tokens.append(losses.token_sum.detach())
            objective = losses.token_sum / self.loss_tokens
        if losses.balance_sum is not None:
            self._balances.append(losses.balance_sum.detach())
            share = losses.balance_sum * self.balance_weight
            objective = share if objective is None else objective + share
        return losses.hidden, objective

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._leaves()

    @property
    def sums(self) -> Tensor:
        """[tokens' losses, balances], in float64; waits for the device."""
        return torch.tensor(
            [
                float(torch.stack(parts).double().sum()) if parts else 0.0
                for parts in (self._tokens, self._balances)
            ],
            dtype=torch.float64,
        )


@lru_cache(maxsize=8)
def training_schedule(layout: Layout, micro_batches: int) -> PipelineSchedule:
    if layout.pp == 1:
        return build("1f1b", 1, micro_batches)
    order = build(layout.schedule, layout.pp, micro_batches, layout.chunks_per_stage)
    # NCCL's sends wait for their receive; the order that allows for it begins receives early, which suits gloo, too
    schedule = with_communication(order, Sends.RENDEZVOUS)
    check(schedule, Sends.RENDEZVOUS)
    return schedule


@lru_cache(maxsize=8)
def forward_schedule(layout: Layout, micro_batches: int) -> PipelineSchedule:
    """Every micro-batch through every chunk, in the direction all pipelines have."""
    orders = tuple(
        tuple(
            Action(Kind.FORWARD, micro_batch, chunk)
            for micro_batch in range(micro_batches)
            for chunk, direction in held_chunks(layout, stage)
            if direction == 0
        )
        for stage in range(layout.pp)
    )
    forward = PipelineSchedule(
        "forward only", layout.pp, micro_batches, chunks_per_stage(layout), stage_placement(layout), orders
    )
    return with_communication(forward, Sends.RENDEZVOUS)
