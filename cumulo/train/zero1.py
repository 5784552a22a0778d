"""Zero1: each rank's optimizer moves some rows of every parameter, then all get all rows. A `GradientSink`.

ZeRO 1 (Rajbhandari et al. 2020, section 5.1): the optimizer's state is shared out over data-parallel ranks.
Gradients are summed as in `DataParallel`, which is half a round more than a reduce-scatter, but overlaps with
backward as there, and leaves whole parameters' gradients where they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cumulo.train.data_parallel import BUCKET_BYTES, DataParallel
from cumulo.train.groups import Groups
from cumulo.train.pieces import Piece, zero_rows
from cumulo.train.sink import Shard, zero_axis


class Zero1:
    def __init__(
        self,
        chunks: Mapping[int, Mapping[str, nn.Parameter]],
        pieces: Mapping[str, Piece],
        groups: Groups,
        wide_gradients: bool,
    ) -> None:
        self._groups = groups
        self._whole = DataParallel(chunks, pieces, groups, wide_gradients)
        self.shards = {name: self._cut(shard) for name, shard in self._whole.shards.items()}

    def begin(self) -> None:
        self._whole.begin()

    def leaves(self, chunk: int) -> Iterator[nn.Parameter]:
        return self._whole.leaves(chunk)

    def last(self, chunk: int) -> None:
        self._whole.last(chunk)

    def finish(self) -> dict[str, Tensor]:
        return {
            name: gradient[self.shards[name].begin : self.shards[name].end]
            for name, gradient in self._whole.finish().items()
        }

    @torch.no_grad()
    def spread(self) -> None:
        for names in self._runs():
            self._gather(names)

    def _cut(self, whole: Shard) -> Shard:
        axis = zero_axis(whole.piece)
        begin, end = zero_rows(whole.end, self._groups.size(axis), self._groups.index(axis))
        holders = whole.holders // self._groups.size(axis)
        return replace(whole, tensor=whole.tensor[begin:end], begin=begin, end=end, holders=holders)

    def _runs(self) -> Iterator[list[str]]:
        """Parameters that are gathered together: from the same ranks, of one type, some bucket's worth."""
        runs: dict[tuple[bool, torch.dtype], list[str]] = {}
        for name, shard in self._whole.shards.items():
            run = runs.setdefault((shard.piece.expert, shard.tensor.dtype), [])
            run.append(name)
            if sum(self._whole.shards[each].tensor.nbytes for each in run) >= BUCKET_BYTES:
                yield run.copy()
                run.clear()
        yield from (run for run in runs.values() if run)

    def _gather(self, names: list[str]) -> None:
        shards = [self._whole.shards[name] for name in names]
        axis = zero_axis(shards[0].piece)
        ranks = self._groups.size(axis)
        if ranks == 1:
            return
        # The longest share of each parameter: shorter ones leave a gap, so that all send alike.
        sizes = [zero_rows(shard.end, ranks, 0)[1] * (shard.tensor.numel() // shard.end) for shard in shards]
        sent = shards[0].tensor.new_zeros(sum(sizes))
        for name, part in zip(names, sent.split(sizes), strict=True):
            own = self.shards[name].tensor.detach().flatten()
            part[: own.numel()] = own
        gathered = [torch.empty_like(sent) for _ in range(ranks)]
        dist.all_gather(gathered, sent, group=self._groups.of(axis))
        for rank, from_rank in enumerate(gathered):
            for shard, part in zip(shards, from_rank.split(sizes), strict=True):
                begin, end = zero_rows(shard.end, ranks, rank)
                rows = shard.tensor[begin:end]
                rows.copy_(part[: rows.numel()].view(rows.shape))
