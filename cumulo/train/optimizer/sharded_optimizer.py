"""ShardedOptimizer: the optimizer's rules on what this rank holds, with norms over all ranks. Owned by the run.

    sink = gradient_sink(chunks, pieces, groups, masters)
    optimizer = ShardedOptimizer(sink, config, spec, masters, groups)
    optimizer.take_gradients(sink.finish()); norm = optimizer.clip(); optimizer.step(share)

Beside the methods of `Optimizer` it has `weights`: what of the model a checkpoint takes from this rank.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from cumulo.layout.pieces import Piece
from cumulo.ranks.collectives import all_reduce
from cumulo.ranks.groups import Groups
from cumulo.spec.model import ModelSpec
from cumulo.train.decide.config import OptimizerConfig
from cumulo.train.optimizer.data_parallel import DataParallel, Zero1
from cumulo.train.optimizer.fsdp import FullySharded
from cumulo.train.optimizer.muon import WholeMatrix
from cumulo.train.optimizer.optimizer import Optimizer, is_inner_matrix
from cumulo.train.optimizer.sink import FsdpPrefetch, GradientSink, Shard


# OneRank: the gradients of a layout of one rank, where autograd leaves them. A `GradientSink`.
#
# Nothing is sent. Gradients of half types are added in float32 where masters are kept, and in the host's memory
# where the optimizer is there: of each micro-batch they are taken over as they come, so that no second copy
# stays.
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


def gradient_sink(
    chunks: Mapping[int, nn.Module],
    pieces: Mapping[str, Piece],
    groups: Groups,
    wide_gradients: bool,
    device: torch.device | None = None,
    offload: bool = False,
    prefetch: FsdpPrefetch = "pre",
    bucket_bytes: int | None = None,
) -> GradientSink:
    """The sink of a layout's ZeRO stage. `chunks`: this rank's by number, with global names. `device`: where
    those of ZeRO 2 and 3 are to be that are on the meta device until now; their shares then have no values yet.
    `offload`: the optimizer is in the host's memory. `prefetch`: of ZeRO 2 and 3."""
    if groups.layout.zero >= 2:
        place = device or next(next(iter(chunks.values())).parameters()).device
        return FullySharded(chunks, pieces, groups, wide_gradients, place, prefetch)
    parameters = {chunk: dict(module.named_parameters()) for chunk, module in chunks.items()}
    if groups.layout.world == 1:
        return OneRank(parameters, pieces, wide_gradients, offload)
    kind = Zero1 if groups.layout.zero else DataParallel
    return kind(parameters, pieces, groups, wide_gradients, bucket_bytes=bucket_bytes)


class ShardedOptimizer(Optimizer):
    def __init__(
        self, sink: GradientSink, config: OptimizerConfig, spec: ModelSpec, masters: bool, groups: Groups
    ) -> None:
        self.sink, self._groups = sink, groups
        wholes: dict[str, WholeMatrix] = {}
        if config.kind == "muon" and (groups.layout.tp > 1 or groups.layout.zero):
            wholes = {
                name: WholeMatrix(shard, spec, groups)
                for name, shard in sink.shards.items()
                if shard.trained and is_inner_matrix(name, shard.tensor)
            }
        updated = {
            name: shard.tensor.requires_grad_()
            for name, shard in sink.shards.items()
            # Who has no rows of a matrix still helps to gather the others'.
            if shard.trained and (shard.tensor.numel() or name in wholes)
        }
        super().__init__(updated, config, spec, masters, wholes)

    def norm(self) -> Tensor:
        """The joint norm over all ranks."""
        if self._groups.layout.world == 1:
            return super().norm()
        by_holders: dict[int, list[Tensor]] = {}
        for name, master in self.masters.items():
            if master.grad is not None:
                by_holders.setdefault(self.sink.shards[name].holders, []).append(master.grad)
        device = next(iter(self.sink.shards.values())).tensor.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for holders, gradients in by_holders.items():  # each element counts once in the sum over ranks
            total += torch.nn.utils.get_total_norm(gradients).to(total).square() / holders
        all_reduce(total, self._groups.group("world"))
        return total.sqrt()

    def step(self, share: float) -> None:
        super().step(share)
        self.sink.spread()

    def state(self) -> dict[str, Tensor]:
        """The live tensors by `NAME.slot`; which rows of NAME they are about, the sink's shards say."""
        masters = {
            f"{name}.master": shard.tensor.detach()
            for name, shard in self.sink.shards.items()
            if shard.tensor.dtype != shard.dtype
        }
        return super().state() | masters

    def weights(self) -> dict[str, Tensor]:
        """The model's weights that this rank holds, in the model's type, rows as in the sink's shards.

        Live, except where the shards are master copies: there they follow from `NAME.master`.
        """
        return {name: shard.tensor.detach().to(shard.dtype) for name, shard in self.sink.shards.items()}

    def loaded(self) -> None:
        super().loaded()
        self.sink.spread(frozen=True)
