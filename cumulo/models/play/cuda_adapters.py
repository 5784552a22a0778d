"""What adapters add to a step of the GPU decoder: the step's rows by adapter, in a buffer that never moves, so that
a captured graph finds them there, and the stacks of every layer's matrices. `CudaDecoder` and `CudaRunner` use it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.kernels.cuda.linear.lora import expand, low_buffer, most_groups, shrink
from cumulo.kernels.low_rank import AdapterGroups, AdapterRows, LowRankStack
from cumulo.models.adapters.bank import AdapterBank

_MOST_APART = 128  # rows of a step in which adapters work beside the products and wholly apart from them


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Views of the buffer for a step of some shape."""

    tokens: AdapterGroups
    outputs: AdapterGroups  # of the rows whose logits are wanted


class CudaAdapters:
    def __init__(self, bank: AdapterBank, max_tokens: int, max_outputs: int) -> None:
        self.bank = bank
        self.stacks = {name: matrix.stack for name, matrix in bank.matrices.items()}
        self.low = low_buffer(list(self.stacks.values()), max_tokens)
        words = self._words(max_tokens) + self._words(max_outputs)
        self._buffer = torch.zeros(words, dtype=torch.int32, device=bank.device)
        self._changed: set[str] = set()
        self._beside = torch.cuda.Stream() if self._buffer.is_cuda else None
        # What is added to a matrix's outputs, one layer's after the other's: by the matrix's name within a layer.
        self._widths = {_within(name): stack.bounds[-1] for name, stack in self.stacks.items()}
        most = min(_MOST_APART, max(max_tokens, max_outputs))
        self._deltas = torch.zeros(most * sum(self._widths.values()), dtype=bank.dtype, device=bank.device)

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
        return self.low.nbytes + self._buffer.nbytes + self._deltas.nbytes

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
        """Fills up to as many groups as the shape has room for; those too many have slot -1 and do nothing."""
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

    # -- a step of a few rows -----------------------------------------------------------------------------------
    def begin(self, rows: int) -> bool:
        """Before the matrices of so many rows: whether `beside` is to be used for them. Rows without an adapter
        get nothing, so they start with zeros."""
        fits = rows * sum(self._widths.values()) <= len(self._deltas)
        if fits:
            self._deltas[: rows * sum(self._widths.values())].zero_()
        return fits

    def _delta(self, name: str, rows: int) -> Tensor:
        first = 0
        for own, width in self._widths.items():
            if own == name:
                return self._deltas[rows * first : rows * (first + width)].view(rows, width)
            first += width
        raise KeyError(name)

    @contextmanager
    def beside(self, name: str, x: Tensor, groups: AdapterGroups) -> Iterator[Tensor | None]:
        """What the rows' adapters add behind a matrix, [rows, outputs], to be read after leaving: both halves run
        beside what is inside, the plain product. None where no adapter changes this matrix."""
        stack: LowRankStack | None = self.stacks.get(name) if name in self._changed else None
        if stack is None:
            yield None
            return
        delta = self._delta(_within(name), len(x))
        here = None if self._beside is None else torch.cuda.current_stream()
        if here is not None and self._beside is not None:
            self._beside.wait_stream(here)
        with nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
            shrink(x, stack, groups, self.low)
            expand(delta, stack, groups, self.low, add=False)
        yield delta
        if here is not None and self._beside is not None:
            here.wait_stream(self._beside)


def _within(name: str) -> str:
    """ "layers.3.ffn.down" -> "ffn.down" """
    return name.split(".", 2)[2]
