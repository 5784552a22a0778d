"""OneRank: the gradients of a layout of one rank, where autograd leaves them. A `GradientSink`.

Nothing is sent. Gradients of half types are added in float32 where masters are kept, and in the host's memory where
the optimizer is there: of each micro-batch they are taken over as they come, so that no second copy stays.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from cumulo.layout.pieces import Piece
from cumulo.train.optimizer.sink import Shard


class OneRank:
    def __init__(
        self,
        chunks: Mapping[int, Mapping[str, nn.Parameter]],
        pieces: Mapping[str, Piece],
        wide_gradients: bool,
        offload: bool,
    ) -> None:
        self._chunks, self._wide, self._offload = chunks, wide_gradients, offload
        named = {name: p for own in chunks.values() for name, p in own.items()}
        self.shards: dict[str, Shard] = {
            name: Shard(p.detach(), pieces[name], 0, len(p), 1, p.requires_grad, p.dtype)
            for name, p in named.items()
        }
        self._trained = {name: p for name, p in named.items() if p.requires_grad}
        self._sums: dict[str, Tensor] = {}

    def begin(self) -> None:
        self._sums = {}
        for parameter in self._trained.values():
            parameter.grad = None

    def leaves(self, chunk: int) -> Iterator[nn.Parameter]:
        return iter(self._chunks[chunk].values())

    def last(self, chunk: int) -> None:
        """There is nothing to send."""

    @torch.no_grad()
    def added(self, chunk: int) -> None:
        for name, parameter in self._trained.items():
            gradient, half = parameter.grad, parameter.dtype in (torch.bfloat16, torch.float16)
            if gradient is None or not (self._offload or (half and self._wide)):
                continue
            device = torch.device("cpu") if self._offload else gradient.device
            taken = gradient.to(device, torch.float32 if half and self._wide else gradient.dtype)
            self._sums[name] = self._sums[name].add_(taken) if name in self._sums else taken
            parameter.grad = None

    def finish(self) -> dict[str, Tensor]:
        found = self._sums
        self._sums = {}
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                found[name], parameter.grad = parameter.grad, None
        return found

    def spread(self, frozen: bool = False) -> None:
        """The shards are the weights."""
