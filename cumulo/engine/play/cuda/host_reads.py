"""What the host reads of a step on a GPU besides its drawn tokens: which draws it must make itself,
log-probabilities of prompt tokens, and sums of hidden states for embeddings. CudaRunner asks for it, in the steps
that need it only.
"""

import queue
import threading
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.plan import StepPlan, TokenLogprobs
from cumulo.engine.play.rank_play import DeviceRank, OwnRows
from cumulo.engine.play.slot_table import SlotTable, StepRows
from cumulo.kernels.cuda.elementwise.rms_norm import rms_norm
from cumulo.models.play.cuda_decoder import CudaDecoder


def need_host(
    table: SlotTable, columns: NDArray[np.void], slots: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Draws that the device cannot make alone: those with guides, penalties or log-probabilities."""
    needed: NDArray[np.bool_] = columns["edited"] | (columns["logprobs"] >= 0)
    needed |= positions - table.prompt_lengths[slots] < table.min_tokens[slots]
    if table.guided:
        params = [table.params[slot] for slot in slots.tolist()]
        needed |= np.array([one is not None and one.guide is not None for one in params], dtype=bool)
    return needed


class HiddenReader:
    """Reads hidden states of a step that has been launched with every row."""

    def __init__(
        self,
        model: CudaDecoder,
        table: SlotTable,
        rows: StepRows,
        own: OwnRows | None,
        rank: DeviceRank | None,
    ) -> None:
        """`own`: those of the rows that are here, where ranks have different ones."""
        self._model, self._table, self._rows, self._own, self._rank = model, table, rows, own, rank

    def _hidden(self, row: int, first: int, count: int) -> Tensor:
        """The final hidden states of so many tokens of a row of the step."""
        model, own, stream = self._model, self._own, self._model.stream
        starts, index = (
            (self._rows.query_starts, row) if own is None else (own.rows.query_starts, own.place[row])
        )
        if index < 0:
            states = stream.new_zeros((count, stream.shape[1]))
        else:
            picked = torch.arange(count, dtype=torch.int32, device=stream.device) + int(starts[index]) + first
            states = rms_norm(stream, model.decoder.final_norm.weight, model.spec.norm_eps, rows=picked)
        return states if self._rank is None else self._rank.all_states(states)

    def prompt_logprobs(self, row: int) -> list[TokenLogprobs]:
        """Log-probabilities of a row's prompt tokens. It computes logits in the place of those that were drawn
        from."""
        table, model = self._table, self._model
        slot, start = int(self._rows.slots[row]), int(self._rows.starts[row])
        count = min(int(self._rows.counts[row]), int(table.prompt_lengths[slot]) - 1 - start)

        def logits_of(first: int, size: int) -> Tensor:
            model.logits_of(self._hidden(row, first, size), model.logits[:size])
            return model.whole_logits(size)

        return table.prompt_logprobs(slot, start, count, logits_of, min(64, model.max_outputs))

    def pooled(self, plan: StepPlan) -> list[NDArray[np.float64]]:
        """Sums of the hidden states of the rows that the plan pools."""
        found = []
        for row, first in zip(plan.pool_rows, plan.pool_starts, strict=True):
            begin = first - int(self._rows.starts[row])
            states = self._hidden(row, begin, int(self._rows.counts[row]) - begin)
            found.append(states.sum(dim=0, dtype=torch.float64).cpu().numpy())
        return found


Tell = Callable[[int], None]


class LayerEvents:
    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marked: queue.SimpleQueue[tuple[torch.cuda.Event, Tell, int]] = queue.SimpleQueue()
        if self._on_gpu:
            threading.Thread(target=self._watch, name="cumulo-layer-events", daemon=True).start()

    def mark(self, tell: Tell, layer: int) -> None:
        """Everything of this layer has been launched: `tell` is called with it when it has been computed."""
        if not self._on_gpu:
            tell(layer)
            return
        event = torch.cuda.Event()
        event.record()
        self._marked.put((event, tell, layer))

    def _watch(self) -> None:
        while True:
            event, tell, layer = self._marked.get()
            event.synchronize()
            tell(layer)
