"""Packing: which tokens sample number n is. Pure arithmetic over a dataset's index; the loader asks it for batches.

An epoch lays all documents end to end in a random order, cuts that stream into rows of equal length, and takes the
rows in a random order. Both orders follow from seed and epoch, and a row from its number: the only state of the
data is how many samples have been taken, whoever takes them. What is left at the end of an epoch's stream (less
than a row) waits for the next epoch's order.
"""

import json
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cumulo.errors import TrainingError


class TokenDataset:
    """`tokens` is all documents end to end, each with its end token; document d is [starts[d], starts[d + 1])."""

    def __init__(self, folder: Path) -> None:
        try:
            facts = json.loads((folder / "dataset.json").read_text("utf-8"))
            self.tokens: np.ndarray = np.memmap(folder / "tokens.bin", dtype=facts["dtype"], mode="r")
            self.starts: np.ndarray = np.load(folder / "documents.npy")
            # 1 where a token has a loss; None: all have.
            self.loss_mask: np.ndarray | None = None
            if facts["chat"]:
                self.loss_mask = np.memmap(folder / "learnt.bin", dtype=np.uint8, mode="r")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{folder} is not a complete dataset ({error}); build it again: cumulo data build"
            ) from error
        lengths = {len(self.tokens), int(self.starts[-1]), facts["tokens"]}
        if self.loss_mask is not None:
            lengths.add(len(self.loss_mask))
        if len(lengths) != 1 or len(self.starts) != facts["documents"] + 1:
            raise TrainingError(
                f"{folder} is damaged: its parts disagree about how many tokens it has "
                f"({sorted(lengths)}); build it again"
            )
        self.folder = folder

    @property
    def documents(self) -> int:
        return len(self.starts) - 1


IGNORED = -100  # a target without a loss; torch's own number for it
HELD_OUT_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed documents. Positions begin anew with each document, and no target lies in the next one."""

    tokens: np.ndarray  # [B, S] int64
    targets: np.ndarray  # [B, S] int64: the next token, or IGNORED
    positions: np.ndarray  # [B, S] int64
    document_starts: np.ndarray  # [D + 1] int32, into the rows laid end to end
    loss_tokens: int  # targets that are not IGNORED

    def rows(self, first: int, last: int) -> "Batch":
        """The rows [first, last) as a batch of their own."""
        length = self.tokens.shape[1]
        begin, end = first * length, last * length
        inside = self.document_starts[(self.document_starts >= begin) & (self.document_starts < end)]
        targets = self.targets[first:last]
        return Batch(
            self.tokens[first:last],
            targets,
            self.positions[first:last],
            np.append(inside - begin, end - begin).astype(np.int32),
            int(np.count_nonzero(targets != IGNORED)),
        )


class Packing:
    def __init__(
        self, dataset: TokenDataset, sequence_length: int, seed: int, documents: np.ndarray | None = None
    ) -> None:
        """`documents`: only these (indices); None: all."""
        self.dataset, self.length, self.seed = dataset, sequence_length, seed
        self.documents = np.arange(dataset.documents) if documents is None else documents
        self.sizes = np.diff(dataset.starts)[self.documents]
        self.tokens = int(self.sizes.sum())
        self.samples_per_epoch = (self.tokens - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise TrainingError(
                f"the data has {self.tokens:,} tokens, too few for one sequence of {sequence_length}; "
                "add data or lower data.sequence_length"
            )
        self._orders = lru_cache(maxsize=2)(self._order)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The order of an epoch: documents, where each begins in the stream (and the stream's end), and rows."""
        random = np.random.default_rng([self.seed, epoch])
        shuffled = random.permutation(len(self.documents))
        begins = np.concatenate(([0], np.cumsum(self.sizes[shuffled])))
        return self.documents[shuffled], begins, random.permutation(self.samples_per_epoch)

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples [first_sample, first_sample + count) of the endless sequence of epochs."""
        data, length = self.dataset, self.length
        stream = np.empty((count, length + 1), dtype=np.int64)
        has_loss = np.ones((count, length + 1), dtype=bool)
        positions = np.empty((count, length), dtype=np.int64)
        starts: list[int] = []
        for row in range(count):
            epoch, number = divmod(first_sample + row, self.samples_per_epoch)
            documents, begins, rows = self._orders(epoch)
            at = int(rows[number]) * length
            index, filled = int(np.searchsorted(begins, at, side="right")) - 1, 0
            while filled < length + 1:  # piece after piece of the documents at [at, at + length + 1)
                source = int(data.starts[documents[index]]) + at + filled - int(begins[index])
                size = min(length + 1 - filled, int(begins[index + 1]) - at - filled)
                piece = slice(filled, filled + size)
                stream[row, piece] = data.tokens[source : source + size]
                if data.loss_mask is not None:
                    has_loss[row, piece] = data.loss_mask[source : source + size]
                if filled < length:
                    positions[row, piece] = _COUNTING[: min(size, length - filled)]
                    starts.append(row * length + filled)
                has_loss[row, filled] = False  # the first token of a piece is nobody's next token
                filled, index = filled + size, index + 1
        targets = np.where(has_loss[:, 1:], stream[:, 1:], IGNORED)
        return Batch(
            stream[:, :-1],
            targets,
            positions,
            np.array([*starts, count * length], dtype=np.int32),
            int(np.count_nonzero(targets != IGNORED)),
        )


_COUNTING = np.arange(1 << 20)


def split_documents(dataset: TokenDataset, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents to train on and documents held out, drawn by lot; with a single document nothing is held out."""
    order = np.random.default_rng([seed, 1 << 32]).permutation(dataset.documents)
    held_out = min(max(1, int(dataset.documents * HELD_OUT_SHARE)), dataset.documents - 1)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch as tensors: tokens and targets [B, S] int64, positions [B, S], document starts [D + 1] int32."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_starts: Tensor
    documents: int
    loss_tokens: int


def to_device(batch: Batch, device: torch.device) -> DeviceBatch:
    def move(array: object) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    starts = batch.document_starts
    return DeviceBatch(
        move(batch.tokens),
        move(batch.targets),
        move(batch.positions),
        move(starts),
        len(starts) - 1,
        batch.loss_tokens,
    )


class BatchLoader:
    """Batches of `count` samples from sample `first` on, `depth` of which a thread makes in advance, until
    `close` ends it."""

    def __init__(
        self, packing: Packing, first: int, count: int, depth: int, place: tuple[int, int] = (0, 1)
    ) -> None:
        """`place`: which of how many equal parts of every batch is wanted."""
        part, parts = place
        self._packing, self._own, self._count = packing, count // parts, count
        self._at = first + part * self._own
        self.stall_s = 0.0  # how long the trainer has waited in all
        self._thread = ThreadPoolExecutor(1, "batch-loader")
        self._coming = deque(self._begin() for _ in range(depth))

    def next(self) -> Batch:
        begin = time.perf_counter()
        batch = self._coming.popleft().result()
        self.stall_s += time.perf_counter() - begin
        self._coming.append(self._begin())
        return batch

    def _begin(self) -> Future[Batch]:
        at, self._at = self._at, self._at + self._count
        return self._thread.submit(self._packing.batch, at, self._own)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
