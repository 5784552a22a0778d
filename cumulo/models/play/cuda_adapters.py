"""What adapters add to a step of the GPU decoder: the step's rows by adapter, in a buffer that never moves, so that
a captured graph finds them there, and the stacks of every layer's matrices. `CudaDecoder` and `CudaRunner` use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.kernels.cuda.linear.lora import expand, low_buffer, most_groups, shrink
from cumulo.kernels.low_rank import AdapterGroups, AdapterRows, LowRankStack
from cumulo.models.adapters.bank import AdapterBank


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Views of the buffer for a step of some shape."""

    tokens: AdapterGroups
    outputs: AdapterGroups  # of the rows whose logits are wanted


class CudaAdapters:
    def __init__(self, bank: AdapterBank, max_tokens: int, max_outputs: int) -> None:
        self.bank = bank
        self.stacks = {name: matrix.stack for name, matrix in bank.matrices.items()}
        widest = max(self.stacks.values(), key=lambda stack: stack.a.shape[1])
        self.low = low_buffer(widest, max_tokens)
        words = self._words(max_tokens) + self._words(max_outputs)
        self._buffer = torch.zeros(words, dtype=torch.int32, device=bank.device)
        self._changed: set[str] = set()
        self._beside = torch.cuda.Stream() if self._buffer.is_cuda else None

    @contextmanager
    def every_matrix(self) -> Iterator[None]:
        """Inside, all matrices are taken for changed, whatever adapters there are: for warming up."""
        changed, self._changed = self._changed, set(self.stacks)
        try:
            yield
        finally:
            self._changed = changed

    def look_again(self) -> bool:
        """After adapters have come: which matrices any of them changes. True if others than before: graphs that
        were captured then do not fit any more."""
        changed = {name for name, stack in self.stacks.items() if bool(stack.ranks.any())}
        before, self._changed = self._changed, changed | self._changed
        return self._changed != before

    @property
    def nbytes(self) -> int:
        return self.low.nbytes + self._buffer.nbytes

    def _words(self, rows: int) -> int:
        return rows + 2 * most_groups(rows, self.bank.slots) + 1

    def views(self, tokens: int, outputs: int) -> StepAdapters:
        """Where a step of so many tokens and outputs finds its groups."""
        first = self._words(tokens)
        return StepAdapters(
            self._groups(self._buffer[:first], tokens),
            self._groups(self._buffer[first : first + self._words(outputs)], outputs),
        )

    def _groups(self, words: Tensor, rows: int) -> AdapterGroups:
        count = most_groups(rows, self.bank.slots)
        order, starts, slots = words.split((rows, count + 1, count))
        return AdapterGroups(order, order, starts, slots, ())

    def send(self, step: AdapterRows, tokens: int, outputs: int) -> None:
        """Bring the step's groups, made in the host's memory, to where a step of this shape reads them."""
        words = np.concatenate((self._filled(step.tokens, tokens), self._filled(step.outputs, outputs)))
        source = torch.from_numpy(words)
        if self._buffer.is_cuda:
            source = source.pin_memory()
        self._buffer[: len(words)].copy_(source, non_blocking=True)

    def _filled(self, groups: AdapterGroups, rows: int) -> NDArray[np.int32]:
        """As many groups as the shape has room for; those too many have slot -1 and do nothing."""
        count = most_groups(rows, self.bank.slots)
        words = np.zeros(self._words(rows), dtype=np.int32)
        order, starts, slots = words[:rows], words[rows : rows + count + 1], words[rows + count + 1 :]
        order[: len(groups.rows)] = groups.rows.numpy()
        starts[:] = len(groups.rows)
        starts[: len(groups.starts)] = groups.starts.numpy()
        slots[:] = -1
        slots[: len(groups.slots)] = groups.slots.numpy()
        return words

    @contextmanager
    def added(self, name: str, x: Tensor, y: Tensor, groups: AdapterGroups) -> Iterator[None]:
        """Inside, the plain product goes from x to y; on leaving, what the rows' adapters make of x is added. Their
        first half runs beside the product, which leaves most of the GPU waiting for its weights."""
        stack: LowRankStack | None = self.stacks.get(name) if name in self._changed else None
        if stack is None:  # none changes this matrix
            yield
            return
        if self._beside is None:
            shrink(x, stack, groups, self.low)
            yield
        else:
            here = torch.cuda.current_stream()
            self._beside.wait_stream(here)
            with torch.cuda.stream(self._beside):
                shrink(x, stack, groups, self.low)
            yield
            here.wait_stream(self._beside)
        expand(y, stack, groups, self.low)
