"""What `cumulo bench data` measures: how fast batches come from a memory-mapped dataset, on one core."""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cumulo.base.report import Row
from cumulo.train.data.packing import Packing, TokenDataset

TOKENS = 20_000_000
BATCH = 16


def measure(repeats: int, tell: Callable[[str], None]) -> list[Row]:
    """Rows for sequences of 1,024 and 4,096 over documents of 20 to 2,000 tokens."""
    with TemporaryDirectory() as name:
        tell("writing a dataset")
        dataset = _dataset(Path(name))
        rows = []
        for length in (1024, 4096):
            packing = Packing(dataset, length, seed=0)
            packing.batch(0, 1)  # the epoch's order is made once
            batches = packing.samples_per_epoch // BATCH
            best_s = float("inf")
            for repeat in range(repeats):
                tell(f"sequences of {length}, round {repeat + 1}")
                begin = time.perf_counter()
                for index in range(batches):
                    packing.batch(index * BATCH, BATCH)
                best_s = min(best_s, time.perf_counter() - begin)
            speed = batches * BATCH * length / best_s
            # What the bytes alone cost: the same tokens copied from the map and widened, in the same pieces.
            note = f"{speed / _copy_speed(dataset, length, repeats):.2f} × copying alone"
            name, unit = f"packed batches, sequences of {length:,}", "million tokens/s"
            rows.append(Row(name, speed / 1e6, unit, must=5.0, aim=20.0, note=note))
        return rows


def _copy_speed(dataset: TokenDataset, length: int, repeats: int) -> float:
    rows = len(dataset.tokens) // length
    target = np.empty(length, dtype=np.int64)
    best_s = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        for row in range(rows):
            target[:] = dataset.tokens[row * length : (row + 1) * length]
        best_s = min(best_s, time.perf_counter() - begin)
    return rows * length / best_s


def _dataset(folder: Path) -> TokenDataset:
    random = np.random.default_rng(0)
    random.integers(0, 50_000, TOKENS, dtype=np.uint16).tofile(folder / "tokens.bin")
    sizes = random.integers(20, 2000, TOKENS // 500)
    ends = np.cumsum(sizes)
    ends = ends[ends < TOKENS]
    np.save(folder / "documents.npy", np.concatenate(([0], ends, [TOKENS])))
    facts = f'{{"dtype": "uint16", "tokens": {TOKENS}, "documents": {len(ends) + 1}, "chat": false}}'
    (folder / "dataset.json").write_text(facts)
    return TokenDataset(folder)
