"""Zero1: each rank's optimizer moves some rows of every parameter, then all get all rows. A `GradientSink`.

ZeRO 1 (Rajbhandari et al. 2020, section 5.1): the optimizer's state is shared out over data-parallel ranks.
Gradients are summed in `DataParallel`'s buckets while backward still runs, but each rank gets its own rows only: a
reduce-scatter, half of the bytes of an all-reduce.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from cumulo.layout.pieces import Piece, zero_rows
from cumulo.ranks.collectives import Work, all_gather_list, all_reduce, start_reduce_scatter
from cumulo.ranks.groups import Groups
from cumulo.train.optimizer.data_parallel import BUCKET_BYTES, DataParallel, GradientBucket
from cumulo.train.optimizer.sink import Shard


class ReduceScatter:
    """Of a bucket's gradients, each rank gets the sum of the rows that its optimizer moves. An `Exchange`."""

    def __init__(self, bucket: GradientBucket, piece: Piece, groups: Groups) -> None:
        axis = piece.zero_axis
        self._bucket, self._group = bucket, groups.group(axis)
        self._ranks, self._index = groups.size(axis), groups.index(axis)
        # Hybrid sharding: the sums of those that share are parts of the whole one.
        copied = not piece.expert and groups.size("copies") > 1
        self._copies = groups.group("copies") if copied else None
        self._work: Work | None = None
        # The longest share of each parameter: shorter ones leave a gap, so that all get as much.
        self._sizes = [zero_rows(len(view), self._ranks, 0)[1] * view[0].numel() for view in bucket.views]
        self._sum = bucket.flat

    def start(self) -> None:
        if self._ranks == 1:
            return
        sent = self._bucket.flat.new_zeros(self._ranks, sum(self._sizes))
        for view, columns in zip(self._bucket.views, sent.split(self._sizes, 1), strict=True):
            for rank, column in enumerate(columns):
                begin, end = zero_rows(len(view), self._ranks, rank)
                rows = view[begin:end].flatten()
                column[: len(rows)] = rows
        self._sum = sent.new_empty(sum(self._sizes))
        self._work = start_reduce_scatter(self._sum, sent.view(-1), self._group)

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None  # and what was sent
        all_reduce(self._sum, self._copies)
        return self._sum

    def parts(self) -> Iterator[Tensor]:
        for view, part in zip(self._bucket.views, self._sum.split(self._sizes), strict=True):
            begin, end = zero_rows(len(view), self._ranks, self._index)
            yield part[: view[begin:end].numel()].view(end - begin, *view.shape[1:])


class Zero1:
    def __init__(
        self,
        chunks: Mapping[int, Mapping[str, nn.Parameter]],
        pieces: Mapping[str, Piece],
        groups: Groups,
        wide_gradients: bool,
        bucket_bytes: int | None = None,
    ) -> None:
        self._groups = groups
        self._whole = DataParallel(chunks, pieces, groups, wide_gradients, ReduceScatter, bucket_bytes)
        self.shards = {name: self._cut(shard) for name, shard in self._whole.shards.items()}

    def begin(self) -> None:
        self._whole.begin()

    def leaves(self, chunk: int) -> Iterator[nn.Parameter]:
        return self._whole.leaves(chunk)

    def last(self, chunk: int) -> None:
        self._whole.last(chunk)

    def added(self, chunk: int) -> None:
        """The hooks have seen them."""

    def finish(self) -> dict[str, Tensor]:
        return self._whole.finish()

    @torch.no_grad()
    def spread(self, frozen: bool = False) -> None:
        for names in self._runs(frozen):
            self._gather(names)

    def _cut(self, whole: Shard) -> Shard:
        axis = whole.piece.zero_axis
        begin, end = zero_rows(whole.end, self._groups.size(axis), self._groups.index(axis))
        holders = whole.holders // self._groups.size(axis)
        return replace(whole, tensor=whole.tensor[begin:end], begin=begin, end=end, holders=holders)

    def _runs(self, frozen: bool) -> Iterator[list[str]]:
        """Parameters that are gathered together: from the same ranks, of one type, some bucket's worth."""
        runs: dict[tuple[bool, torch.dtype], list[str]] = {}
        for name, shard in self._whole.shards.items():
            if not (shard.trained or frozen):
                continue
            run = runs.setdefault((shard.piece.expert, shard.tensor.dtype), [])
            run.append(name)
            if sum(self._whole.shards[each].tensor.nbytes for each in run) >= BUCKET_BYTES:
                yield run.copy()
                run.clear()
        yield from (run for run in runs.values() if run)

    def _gather(self, names: list[str]) -> None:
        shards = [self._whole.shards[name] for name in names]
        axis = shards[0].piece.zero_axis
        ranks = self._groups.size(axis)
        if ranks == 1:
            return
        # The longest share of each parameter: shorter ones leave a gap, so that all send alike.
        sizes = [zero_rows(shard.end, ranks, 0)[1] * (shard.tensor.numel() // shard.end) for shard in shards]
        sent = shards[0].tensor.new_zeros(sum(sizes))
        for name, part in zip(names, sent.split(sizes), strict=True):
            own = self.shards[name].tensor.detach().flatten()
            part[: own.numel()] = own
        for rank, from_rank in enumerate(all_gather_list(sent, self._groups.group(axis))):
            for shard, part in zip(shards, from_rank.split(sizes), strict=True):
                begin, end = zero_rows(shard.end, ranks, rank)
                rows = shard.tensor[begin:end]
                rows.copy_(part[: rows.numel()].view(rows.shape))
