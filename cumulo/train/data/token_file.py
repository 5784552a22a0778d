"""TokenDataset: a built dataset, memory-mapped. Opened by `prepare.py`, read by `packing.py` without copying."""

import json
from pathlib import Path

import numpy as np

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
