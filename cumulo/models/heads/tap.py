"""StreamTap: keeps a decoder's residual stream between some of its layers, token by token, in KV-cache slots. A
draft head reads it there; decoders that have a tap write into it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class StreamTap:
    def __init__(
        self, layers: Sequence[int], slots: int, hidden: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """`layers`: the stream is kept as it enters these, ascending; behind the last layer, normed."""
        self.layers = tuple(layers)
        self.kept = torch.zeros((slots, len(self.layers) * hidden), dtype=dtype, device=device)
        self._hidden = hidden

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes

    def places(self, layer: int) -> list[Tensor]:
        """Where the stream that enters a layer is kept, [slots, hidden]: a model of few layers has several."""
        hidden = self._hidden
        return [
            self.kept[:, place * hidden : (place + 1) * hidden]
            for place, kept in enumerate(self.layers)
            if kept == layer
        ]

    def keep(self, layer: int, stream: Tensor, slots: Tensor) -> None:
        """The stream [tokens, hidden] that enters a layer, and where each token's keys and values lie."""
        for kept in self.places(layer):
            kept[slots] = stream

    def stream_at(self, slots: Tensor) -> Tensor:
        """[tokens, layers x hidden]."""
        return self.kept[slots]

    def copy_blocks(self, pairs: list[tuple[int, int]], block_size: int) -> None:
        blocks = self.kept.view(-1, block_size, self.kept.shape[1])
        for source, target in pairs:
            blocks[target] = blocks[source]


def eagle_layers(layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer, as EAGLE-3 takes them (Li et al. 2025; its published code)."""
    low = min(2, layers - 1)
    return low, max(low, layers // 2), max(low, layers - 3)
