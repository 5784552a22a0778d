"""Batches for a model without an engine."""

import torch
from torch import Tensor

from cumulo.models.batch import ForwardBatch


def one_sequence(tokens: Tensor, places: Tensor) -> ForwardBatch:
    """A step that computes one whole sequence, in a cache of one block."""

    def small(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=places.device)

    return ForwardBatch(
        token_ids=tokens, positions=places, slots=places, query_starts=small(0, len(places)),
        context_lengths=small(len(places)), block_tables=small(0)[None], logit_rows=places[-1:],
    )  # fmt: skip
