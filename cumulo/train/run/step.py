"""One step's gradients in one process: a batch in micro-batches. Called by `model_run.py`."""

from dataclasses import dataclass

import torch

from cumulo.train.data.loader import to_device
from cumulo.train.data.packing import Batch
from cumulo.train.model.model import TrainingDecoder
from cumulo.train.optimizer.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class StepLoss:
    loss: float  # nats per learnt token
    balance: float  # mean over rows; 0 without experts


def compute_gradients(
    model: TrainingDecoder,
    optimizer: Optimizer,
    batch: Batch,
    micro_batch: int,
    balance_weight: float,
    device: torch.device,
) -> StepLoss:
    """Leave the gradients of the whole batch's mean loss with the optimizer.

    Sums are divided by the whole batch's counts, so the result does not depend on how it is cut into micro-batches.
    """
    rows, learnt = len(batch.tokens), max(1, batch.learnt_tokens)
    token_sum = torch.zeros((), dtype=torch.float64, device=device)
    balance_sum = torch.zeros((), dtype=torch.float64, device=device)
    for first in range(0, rows, micro_batch):
        losses = model(to_device(batch.rows(first, first + micro_batch), device))
        objective = losses.token_sum / learnt
        token_sum += losses.token_sum.detach()
        if losses.balance_sum is not None:
            balance_sum += losses.balance_sum.detach()
            objective = objective + losses.balance_sum * (balance_weight / rows)
        objective.backward()
        optimizer.accumulate()
    return StepLoss(float(token_sum) / learnt, float(balance_sum) / rows)
