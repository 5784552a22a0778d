"""The loss on held-out data, the same sequences every time. Called by the trainer, on all ranks alike."""

from dataclasses import replace

import numpy as np

from cumulo.train.data.packing import IGNORED, Batch, Packing
from cumulo.train.decide.config import TrainConfig
from cumulo.train.run.model_run import ModelRun


def held_out_loss(run: ModelRun, packing: Packing, config: TrainConfig) -> float:
    """Nats per token over the first `evaluate_sequences`; what fills up the last micro-batches does not count."""
    part, parts = run.data_place
    count = min(config.evaluate_sequences, packing.samples_per_epoch)
    # Cuts of a sequence and 8-bit products need the tokens of a whole micro-batch; others do with fewer.
    whole = config.layout.world > parts or config.products != "wide"
    micro = config.micro_batch if whole else min(config.micro_batch, count)
    own = -(-count // (parts * micro)) * micro
    total, loss_tokens = 0.0, 0
    for first in range(part * own, (part + 1) * own, micro):
        batch = _only(packing.batch(first, micro), count - first)
        total += run.token_sum(batch, micro)
        loss_tokens += run.agree(batch.loss_tokens, False)[0]
    return total / max(1, loss_tokens)


def _only(batch: Batch, rows: int) -> Batch:
    """The batch with no loss after its first `rows`."""
    if rows >= len(batch.tokens):
        return batch
    targets = batch.targets.copy()
    targets[max(0, rows) :] = IGNORED
    return replace(batch, targets=targets, loss_tokens=int(np.count_nonzero(targets != IGNORED)))
