"""DeviceSlots: tokens and block tables of live sequences on the device, and the one buffer a step's plan
travels in.

The host keeps the same in its SlotTable, but learns sampled tokens late; the device has them at once, so the
next step can be submitted before anyone has seen them. Owned by CudaRunner.
"""

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.plan import NewSlot
from cumulo.engine.play.cuda.step_words import DRAW_WORDS, StepShape
from cumulo.kernels.cuda.elementwise.step_inputs import fill_rows, scatter, step_inputs
from cumulo.models.play.cuda_rows import StepSplit

_STAGES = 4  # plans under way at the same time; a buffer is written again only after its copy has ended


class Stage:
    """A page-locked buffer and the moment from which it may be written again."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.tensor = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.array: NDArray[np.int32] = self.tensor.numpy()
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def sent(self) -> None:
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


class DeviceSlots:
    def __init__(
        self, max_slots: int, max_context: int, block_size: int, max_tokens: int, max_draws: int,
        device: torch.device, data_ranks: int = 0,
    ) -> None:  # fmt: skip
        self.device, self.block_size = device, block_size
        blocks = -(-(max_context + 1) // block_size)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tokens, self.tables = zeros(max_slots, max_context + 1), zeros(max_slots, blocks)
        rows = max(max_slots, max_draws)  # a token that is verified may be a row of its own
        widest = StepShape(max_tokens, rows, max_draws, data_ranks=data_ranks)
        self.words = zeros(widest.words)
        self.token_ids, self.positions, self.kv_slots = (
            zeros(max_tokens),
            zeros(max_tokens),
            zeros(max_tokens),
        )
        self.contexts, self.step_tables = zeros(rows), zeros(rows, blocks)
        self._stages = deque(Stage(widest.words, device) for _ in range(_STAGES))
        self._flight: deque[Tensor] = deque(maxlen=_STAGES)  # kept until their copies must have ended

    @property
    def nbytes(self) -> int:
        own = (
            self.tokens,
            self.tables,
            self.words,
            self.token_ids,
            self.positions,
            self.kv_slots,
            self.contexts,
        )
        return sum(tensor.nbytes for tensor in own) + self.step_tables.nbytes

    # -- changes ------------------------------------------------------------------------------------------
    def begin(self, slots: list[NewSlot]) -> None:
        """Enter tokens and blocks of sequences that begin: one copy, two launches."""
        if not slots:
            return
        tokens, blocks = [new.tokens for new in slots], [new.blocks for new in slots]
        counts = np.array([[len(t) for t in tokens], [len(b) for b in blocks]], dtype=np.int32)
        flat = np.concatenate(
            [np.asarray(part, dtype=np.int32) for part in (*tokens, *blocks, [new.slot for new in slots])]
        )
        offsets = np.cumsum(counts.reshape(-1)) - counts.reshape(-1)
        count = len(slots)
        words = self._send(np.concatenate((flat, offsets.astype(np.int32), counts.reshape(-1))))
        rows = words[len(flat) - count : len(flat)]
        offset, size = words[len(flat) : len(flat) + 2 * count], words[len(flat) + 2 * count :]
        fill_rows(words, offset[:count], size[:count], rows, self.tokens)
        fill_rows(words, offset[count:], size[count:], rows, self.tables)

    def set_blocks(self, changes: list[tuple[int, int, int]]) -> None:
        """tables[slot, index] = block for each (slot, index, block)."""
        self._scatter(changes, self.tables)

    def set_tokens(self, changes: list[tuple[int, int, int]]) -> None:
        """tokens[slot, position] = token for each (slot, position, token)."""
        self._scatter(changes, self.tokens)

    def _scatter(self, changes: list[tuple[int, int, int]], target: Tensor) -> None:
        if changes:
            words = self._send(np.array(changes, dtype=np.int32).T.reshape(-1))
            rows, columns, values = words.view(3, -1)
            scatter(rows, columns, values, target)

    def _send(self, array: NDArray[np.int32]) -> Tensor:
        source = torch.from_numpy(array)
        if self.device.type == "cuda":
            source = source.pin_memory()
            self._flight.append(source)
        return source.to(self.device, non_blocking=True)

    # -- a step -------------------------------------------------------------------------------------------
    def stage(self) -> Stage:
        """The next buffer to pack a plan into."""
        self._stages.rotate(-1)
        self._stages[0].wait()
        return self._stages[0]

    def send(self, stage: Stage, shape: StepShape) -> None:
        self.words[: shape.words].copy_(stage.tensor[: shape.words], non_blocking=True)
        stage.sent()

    def views(self, shape: StepShape) -> tuple[Tensor, Tensor]:
        """Where a step of this shape finds its logit rows [R] and its draws [R, words]."""
        rest = self.words[5 * shape.rows + 1 : shape.plain_words]
        return rest[: shape.draws], rest[shape.draws :].view(shape.draws, len(DRAW_WORDS))

    def split(self, shape: StepShape) -> StepSplit | None:
        if not shape.data_ranks:
            return None
        words = self.words[shape.plain_words : shape.words]
        return StepSplit(words[: shape.data_ranks + 1], words[shape.data_ranks + 1 :], shape.all_tokens)

    def query_starts(self, shape: StepShape) -> Tensor:
        return self.words[2 * shape.rows : 3 * shape.rows + 1]

    def unpack(self, shape: StepShape) -> None:
        """Launch: from the words to token ids, positions, KV slots, context lengths and block tables."""
        size, words, tokens = shape.rows, self.words, shape.tokens
        step_inputs(
            words[:size], words[size : 2 * size], words[2 * size : 3 * size + 1],
            words[3 * size + 1 : 4 * size + 1], words[4 * size + 1 : 5 * size + 1],
            self.tokens, self.tables, self.block_size, self.token_ids[:tokens], self.positions[:tokens],
            self.kv_slots[:tokens], self.contexts[:size], self.step_tables[:size],
        )  # fmt: skip
