"""native_step: a step as the native kernels read it. The fused decoder and the fused draft head call it."""

import torch
from torch import Tensor

from cumulo.kernels.cpu.library import StepStruct
from cumulo.models.batch import ForwardBatch, KVCache


def native_step(
    batch: ForwardBatch, cache: KVCache, outputs: int, vocabulary: int, position_limit: int
) -> StepStruct:
    """The step holds addresses, so that the batch must live until it is played; `position_limit`: the rows of the
    rotary tables."""
    block_tables = batch.block_tables.contiguous()
    step = StepStruct(
        tokens=len(batch.token_ids),
        sequences=len(batch.context_lengths),
        outputs=outputs,
        table_stride=block_tables.shape[1],
        vocabulary=vocabulary,
        position_limit=position_limit,
        blocks=cache.blocks,
        block_size=cache.block_size,
        token_ids=pointer(batch.token_ids, torch.int64),
        positions=pointer(batch.positions, torch.int64),
        slots=pointer(batch.slots, torch.int64),
        output_rows=pointer(batch.logit_rows, torch.int64),
        query_starts=pointer(batch.query_starts, torch.int32),
        context_lengths=pointer(batch.context_lengths, torch.int32),
        block_tables=pointer(block_tables, torch.int32),
    )
    step.kept = block_tables  # may be a copy that nobody else holds
    return step


def pointer(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of a tensor, checked to be what the kernels expect."""
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous {dtype} tensor, got {tensor.dtype} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()
