"""Gradients summed over ranks in buckets, while backward still runs: DataParallel (ZeRO 0) and Zero1. Each is a
`GradientSink`.

Written by hand, not torch's DistributedDataParallel, because several chunks of a pipeline share one step, gradients
are sums, and tensor-parallel ranks and copies on other stages add theirs. Gradients lie in the buckets from the
start (`parameter.grad` is a view), so nothing is copied; half types are summed in float32 where masters are kept.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from cumulo.layout.pieces import Piece, zero_rows
from cumulo.ranks.collectives import (
    Work,
    all_gather_list,
    all_reduce,
    start_all_reduce,
    start_reduce_scatter,
)
from cumulo.ranks.groups import Group, Groups
from cumulo.train.optimizer.sink import RestGroups, Shard

BUCKET_BYTES = 25 << 20  # long enough for the link's full rate (Li et al. 2020)
FIRST_BUCKET_BYTES = 1 << 20  # what is ready first goes early


class GradientBucket:
    """Gradients that travel together. All ranks with other tokens get the whole sum: an all-reduce."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        piece: Piece,
        groups: Groups,
        rest_group: Group | None,
    ) -> None:
        """`piece`: of any of the parameters; all go to the same ranks."""
        parameters = list(named.values())
        self.names, self.rest_group = tuple(named), rest_group
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
        parts = self.flat.split(sizes)
        self.views = tuple(part.view(p.shape) for part, p in zip(parts, parameters, strict=True))
        self.missing = 0  # gradients that the chunk's last backward has not added to yet
        self.awaited = False  # the chunk's last backward is running
        self.sent = False
        self._work: Work | None = None
        self._piece, self._groups = piece, groups

    def start(self) -> None:
        """The bucket is full: what takes time begins."""
        group = self._groups.group_of_several(self._piece.data_axis)
        self._work = start_all_reduce(self.flat, group)

    def wait(self) -> Tensor:
        """The flat sum: of all gradients, or of what this rank's optimizer needs of them."""
        if self._work is not None:
            self._work.wait()
        return self.flat

    def parts(self) -> Iterable[Tensor]:
        """The flat sum by parameter."""
        return self.views


class DataParallel:
    bucket_kind: type[GradientBucket] = GradientBucket

    def __init__(
        self,
        chunks: Mapping[int, Mapping[str, nn.Parameter]],
        pieces: Mapping[str, Piece],
        groups: Groups,
        wide_gradients: bool,
        bucket_bytes: int | None = None,
    ) -> None:
        """`chunks`: this rank's parameters by chunk; `wide_gradients`: half types' are summed in float32."""
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._chunks, self._groups, self._rest = chunks, groups, RestGroups(pieces, groups)
        self._parameters: dict[str, nn.Parameter] = {}
        holds: dict[str, list[int]] = {}
        for chunk, named in chunks.items():
            for name, parameter in named.items():
                self._parameters[name] = parameter
                holds.setdefault(name, []).append(chunk)
        if wide_gradients:
            for parameter in self._parameters.values():
                if parameter.dtype in (torch.bfloat16, torch.float16):
                    parameter.grad_dtype = torch.float32
        self._whole = {
            name: Shard(
                p.detach(), pieces[name], 0, len(p), len(pieces[name].holders), p.requires_grad, p.dtype
            )
            for name, p in self._parameters.items()
        }
        self.shards = {name: self._own(shard) for name, shard in self._whole.items()}
        # What several chunks add to is nobody's last: it is sent at the end.
        alone = {name: held_by[0] for name, held_by in holds.items() if len(held_by) == 1}
        trained = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        self._buckets: dict[int | None, list[GradientBucket]] = {}
        for holder in (*chunks, None):
            names = [name for name in trained if alone.get(name) == holder]
            # Backwards: the last used have their gradients first.
            self._buckets[holder] = list(self._make_buckets(reversed(names), pieces))
        self._queue: deque[GradientBucket] = deque()
        for bucket in self._all():
            for name in bucket.names:
                self._parameters[name].register_post_accumulate_grad_hook(self._hook(bucket))

    def begin(self) -> None:
        for bucket in self._all():
            bucket.flat.zero_()
            for name, view in zip(bucket.names, bucket.views, strict=True):
                self._parameters[name].grad = view
            bucket.awaited = bucket.sent = False

    def leaves(self, chunk: int) -> Iterator[nn.Parameter]:
        return iter(self._chunks[chunk].values())

    def last(self, chunk: int) -> None:
        self._send_queued()
        for bucket in self._buckets[chunk]:
            bucket.awaited, bucket.missing = True, len(bucket.names)
            self._queue.append(bucket)

    def added(self, chunk: int) -> None:
        """The hooks have seen them."""

    def finish(self) -> dict[str, Tensor]:
        self._send_queued()
        for bucket in self._all():
            if not bucket.sent:
                self._send(bucket)
        # Sorted: a copy on another stage meets the same buckets in the same order.
        for bucket in sorted(self._all(), key=lambda bucket: bucket.names):
            all_reduce(bucket.wait(), bucket.rest_group)
        return {
            name: part
            for bucket in self._all()
            for name, part in zip(bucket.names, bucket.parts(), strict=True)
        }

    def spread(self, frozen: bool = False) -> None:
        """Every rank has moved all its weights."""

    def _own(self, whole: Shard) -> Shard:
        """What this rank's optimizer moves of a parameter."""
        return whole

    # -- buckets -------------------------------------------------------------------------------------------
    def _all(self) -> Iterator[GradientBucket]:
        for buckets in self._buckets.values():
            yield from buckets

    def _make_buckets(self, names: Iterable[str], pieces: Mapping[str, Piece]) -> Iterator[GradientBucket]:
        """In the order given; only what goes to the same ranks in the same type goes together."""
        open_names: dict[tuple[bool, tuple[int, ...], torch.dtype], list[str]] = {}
        limit = min(FIRST_BUCKET_BYTES, self._bucket_bytes)
        for name in names:
            parameter = self._parameters[name]
            gradient_dtype = parameter.grad_dtype or parameter.dtype
            together = open_names.setdefault(
                (pieces[name].expert, self._rest.members[name], gradient_dtype), []
            )
            together.append(name)
            if sum(self._parameters[each].numel() for each in together) * gradient_dtype.itemsize >= limit:
                yield self._make_bucket(together, pieces, gradient_dtype)
                together.clear()
                limit = self._bucket_bytes
        for (_, _, gradient_dtype), together in open_names.items():
            if together:
                yield self._make_bucket(together, pieces, gradient_dtype)

    def _make_bucket(
        self, names: list[str], pieces: Mapping[str, Piece], dtype: torch.dtype
    ) -> GradientBucket:
        named = {name: self._parameters[name] for name in names}
        return self.bucket_kind(named, dtype, pieces[names[0]], self._groups, self._rest.group(names[0]))

    # -- sending: always in the queue's order, so that all ranks send the same bucket at the same time ------
    def _hook(self, bucket: GradientBucket) -> Callable[[Tensor], None]:
        def count(parameter: Tensor) -> None:
            if bucket.awaited:
                bucket.missing -= 1
                while self._queue and self._queue[0].missing == 0:
                    self._send(self._queue.popleft())

        return count

    def _send_queued(self) -> None:
        """Also what made no call to a hook: weight gradients computed apart from the input's."""
        while self._queue:
            self._send(self._queue.popleft())

    def _send(self, bucket: GradientBucket) -> None:
        bucket.sent, bucket.awaited = True, False
        bucket.start()


class ScatteredBucket(GradientBucket):
    """Of a bucket's gradients, each rank gets the sum of the rows that its optimizer moves: a reduce-scatter, which
    sends half of the bytes of an all-reduce."""

    def start(self) -> None:
        axis, self._sum = self._piece.zero_axis, self.flat
        self._ranks, self._index = self._groups.size(axis), self._groups.index(axis)
        # The longest share of each parameter: shorter ones leave a gap, so that all get as much.
        self._sizes = [zero_rows(len(view), self._ranks, 0)[1] * view[0].numel() for view in self.views]
        if self._ranks == 1:
            return
        sent = self.flat.new_zeros(self._ranks, sum(self._sizes))
        for view, columns in zip(self.views, sent.split(self._sizes, 1), strict=True):
            for rank, column in enumerate(columns):
                begin, end = zero_rows(len(view), self._ranks, rank)
                rows = view[begin:end].flatten()
                column[: len(rows)] = rows
        self._sum = sent.new_empty(sum(self._sizes))
        self._work = start_reduce_scatter(self._sum, sent.view(-1), self._groups.group(axis))

    def wait(self) -> Tensor:
        super().wait()
        self._work = None  # and what was sent
        if not self._piece.expert:  # hybrid sharding: the sums of those that share are parts of the whole one
            all_reduce(self._sum, self._groups.group_of_several("copies"))
        return self._sum

    def parts(self) -> Iterator[Tensor]:
        for view, part in zip(self.views, self._sum.split(self._sizes), strict=True):
            begin, end = zero_rows(len(view), self._ranks, self._index)
            yield part[: view[begin:end].numel()].view(end - begin, *view.shape[1:])


class Zero1(DataParallel):
    """Each rank's optimizer moves some rows of every parameter, then all get all rows (Rajbhandari et al. 2020,
    section 5.1): the optimizer's state is shared out over data-parallel ranks."""

    bucket_kind = ScatteredBucket

    @torch.no_grad()
    def spread(self, frozen: bool = False) -> None:
        for names in self._runs(frozen):
            self._gather(names)

    def _own(self, whole: Shard) -> Shard:
        axis = whole.piece.zero_axis
        begin, end = zero_rows(whole.end, self._groups.size(axis), self._groups.index(axis))
        holders = whole.holders // self._groups.size(axis)
        return replace(whole, tensor=whole.tensor[begin:end], begin=begin, end=end, holders=holders)

    def _runs(self, frozen: bool) -> Iterator[list[str]]:
        """Parameters that are gathered together: from the same ranks, of one type, some bucket's worth."""
        runs: dict[tuple[bool, torch.dtype], list[str]] = {}
        for name, shard in self._whole.items():
            if not (shard.trained or frozen):
                continue
            run = runs.setdefault((shard.piece.expert, shard.tensor.dtype), [])
            run.append(name)
            if sum(self._whole[each].tensor.nbytes for each in run) >= BUCKET_BYTES:
                yield run.copy()
                run.clear()
        yield from (run for run in runs.values() if run)

    def _gather(self, names: list[str]) -> None:
        shards = [self._whole[name] for name in names]
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
