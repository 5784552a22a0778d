"""DataParallel: gradients summed over ranks in buckets, while backward still runs (ZeRO 0). A `GradientSink`.

Written by hand, not torch's DistributedDataParallel, because several chunks of a pipeline share one step, gradients
are sums, and tensor-parallel ranks and copies on other stages add theirs. Gradients lie in the buckets from the
start (`parameter.grad` is a view), so nothing is copied; half types are summed in float32 where masters are kept.
How a bucket is added up over ranks is an `Exchange`: here an all-reduce, under ZeRO 1 a reduce-scatter.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from cumulo.layout.pieces import Piece
from cumulo.ranks.collectives import Work, all_reduce, start_all_reduce
from cumulo.ranks.groups import Group, Groups
from cumulo.train.decide.bucket_order import send_order, timings
from cumulo.train.optimizer.sink import RestGroups, Shard

BUCKET_BYTES = 25 << 20  # long enough for the link's full rate (Li et al. 2020)
FIRST_BUCKET_BYTES = 1 << 20  # what is ready first goes early
_MEASURED_STEPS = 2  # before the order of buckets is worked out; the first of them finds memory


class Exchange(Protocol):
    """How the ranks with other tokens add up the gradients of a bucket."""

    def start(self) -> None:
        """The bucket is full: what takes time begins."""
        ...

    def wait(self) -> Tensor:
        """The flat sum: of all gradients, or of what this rank's optimizer needs of them."""
        ...

    def parts(self) -> Iterable[Tensor]:
        """The flat sum by parameter."""
        ...


@dataclass(slots=True, eq=False)
class GradientBucket:
    names: tuple[str, ...]
    flat: Tensor
    views: tuple[Tensor, ...]  # of it: the gradients


class AllReduce:
    def __init__(self, bucket: GradientBucket, piece: Piece, groups: Groups) -> None:
        """`piece`: of any parameter of the bucket; all go to the same ranks."""
        axis = piece.data_axis
        self._bucket, self._group = bucket, groups.group_of_several(axis)
        self._work: Work | None = None

    def start(self) -> None:
        self._work = start_all_reduce(self._bucket.flat, self._group)

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._bucket.flat

    def parts(self) -> Iterable[Tensor]:
        return self._bucket.views


@dataclass(slots=True, eq=False)
class _Sending:
    """A bucket on its way through a step."""

    bucket: GradientBucket
    exchange: Exchange
    rest_group: Group | None
    missing: int = 0  # gradients that the chunk's last backward has not added to yet
    awaited: bool = False  # the chunk's last backward is running
    sent: bool = False
    needed: int = 0  # the place in forward of the first layer that needs it


@dataclass(frozen=True, slots=True, eq=False)
class PendingBucket:
    """Gradients on their way."""

    sending: _Sending

    @property
    def needed(self) -> int:
        return self.sending.needed

    def wait(self) -> dict[str, Tensor]:
        """By the parameter's name."""
        self.sending.exchange.wait()
        return dict(zip(self.sending.bucket.names, self.sending.exchange.parts(), strict=True))


class NeedOrder:
    """The order in which buckets leave, from what the first rank's steps took: the same on all ranks."""

    def __init__(self, groups: Groups) -> None:
        self._group, self._lead = groups.group_of_several("data"), groups.index("data") == 0
        self._steps = 0
        self._began_s = self._ended_s = self._arrived_s = 0.0
        self._order: tuple[int, ...] | None = None

    @property
    def first(self) -> bool:
        return self._steps == 1

    def step_begins(self) -> None:
        self._steps += 1

    def backward_ended(self) -> None:
        self._ended_s = time.perf_counter()

    def arrived(self) -> None:
        """A bucket's gradients were used."""
        self._arrived_s = time.perf_counter()

    def ordered(self, buckets: list[_Sending]) -> list[_Sending]:
        """The first steps' order is as they come: nothing is known yet."""
        if self._order is None and self._steps == _MEASURED_STEPS + 1 and self._group is not None:
            # Of the step before: backward, and bytes over the time until the last of them was used.
            took = [self._ended_s - self._began_s, self._arrived_s - self._began_s]
            told = torch.tensor(took if self._lead else [0.0, 0.0], dtype=torch.float64)
            all_reduce(told, self._group)
            sizes = [one.bucket.flat.nbytes for one in buckets]
            backward_s, link_s = told.tolist()
            rate = sum(sizes) / max(link_s, 1e-9)
            self._order = send_order(timings(sizes, [one.needed for one in buckets], backward_s, rate))
        self._began_s = time.perf_counter()
        return buckets if self._order is None else [buckets[number] for number in self._order]


class DataParallel:
    def __init__(
        self,
        chunks: Mapping[int, Mapping[str, nn.Parameter]],
        pieces: Mapping[str, Piece],
        groups: Groups,
        wide_gradients: bool,
        exchange: Callable[[GradientBucket, Piece, Groups], Exchange] = AllReduce,
        bucket_bytes: int | None = None,
    ) -> None:
        """`chunks`: this rank's parameters by chunk; `wide_gradients`: half types' are summed in float32."""
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._by_need: NeedOrder | None = None
        self._chunks, self._groups, self._rest = chunks, groups, RestGroups(pieces, groups)
        self._exchange = exchange
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
        self.shards: dict[str, Shard] = {
            name: Shard(
                p.detach(), pieces[name], 0, len(p), len(pieces[name].holders), p.requires_grad, p.dtype
            )
            for name, p in self._parameters.items()
        }
        # What several chunks add to is nobody's last: it is sent at the end.
        alone = {name: homes[0] for name, homes in holds.items() if len(homes) == 1}
        self._buckets: dict[int | None, list[_Sending]] = {}
        for home in (*chunks, None):
            names = [name for name in self._trained() if alone.get(name) == home]
            # Backwards: the last used have their gradients first.
            self._buckets[home] = list(self._make_buckets(reversed(names), pieces))
        self._queue: deque[_Sending] = deque()
        for sending in self._all():
            for name in sending.bucket.names:
                self._parameters[name].register_post_accumulate_grad_hook(self._hook(sending))

    def begin(self) -> None:
        if self._by_need is not None:
            self._by_need.step_begins()
        for sending in self._all():
            if self._by_need is None or self._by_need.first:
                self._clear(sending)
            sending.awaited = sending.sent = False

    def _clear(self, sending: _Sending) -> None:
        sending.bucket.flat.zero_()
        for name, view in zip(sending.bucket.names, sending.bucket.views, strict=True):
            self._parameters[name].grad = view

    def leaves(self, chunk: int) -> Iterator[nn.Parameter]:
        return iter(self._chunks[chunk].values())

    def last(self, chunk: int) -> None:
        self._send_queued()
        buckets = self._buckets[chunk]
        if self._by_need is not None:
            buckets = self._by_need.ordered(buckets)
        for sending in buckets:
            sending.awaited, sending.missing = True, len(sending.bucket.names)
            self._queue.append(sending)

    def added(self, chunk: int) -> None:
        """The hooks have seen them."""

    def finish(self) -> dict[str, Tensor]:
        self._send_queued()
        for sending in self._all():
            if not sending.sent:
                self._send(sending)
        # Sorted: a copy on another stage meets the same buckets in the same order.
        for sending in sorted(self._all(), key=lambda sending: sending.bucket.names):
            all_reduce(sending.exchange.wait(), sending.rest_group)
        return {
            name: part
            for sending in self._all()
            for name, part in zip(sending.bucket.names, sending.exchange.parts(), strict=True)
        }

    # -- gradients that are waited for one by one ------------------------------------------------------------
    def use_places(self, places: Mapping[str, int]) -> None:
        """From now on gradients leave by when the next forward needs them: `places` of the parameters in it. A
        bucket is cleared by `begin_bucket` when it was used, not by `begin`."""
        for sending in self._all():
            sending.needed = min(places[name] for name in sending.bucket.names)
        self._by_need = NeedOrder(self._groups)

    def finish_later(self) -> list[PendingBucket]:
        """In place of `finish`, without waiting; those that are needed first come first."""
        self._send_queued()
        if self._by_need is not None:
            self._by_need.backward_ended()
        return sorted(map(PendingBucket, self._all()), key=lambda one: one.needed)

    def begin_bucket(self, bucket: PendingBucket) -> None:
        """It was used."""
        if self._by_need is not None:
            self._by_need.arrived()
        self._clear(bucket.sending)

    def spread(self, frozen: bool = False) -> None:
        """Every rank has moved all its weights."""

    # -- buckets -------------------------------------------------------------------------------------------
    def _trained(self) -> Iterator[str]:
        return (name for name, parameter in self._parameters.items() if parameter.requires_grad)

    def _all(self) -> Iterator[_Sending]:
        for buckets in self._buckets.values():
            yield from buckets

    def _make_buckets(self, names: Iterable[str], pieces: Mapping[str, Piece]) -> Iterator[_Sending]:
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

    def _make_bucket(self, names: list[str], pieces: Mapping[str, Piece], dtype: torch.dtype) -> _Sending:
        parameters = [self._parameters[name] for name in names]
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        parts = flat.split([p.numel() for p in parameters])
        views = tuple(part.view(p.shape) for part, p in zip(parts, parameters, strict=True))
        bucket = GradientBucket(tuple(names), flat, views)
        exchange = self._exchange(bucket, pieces[names[0]], self._groups)
        return _Sending(bucket, exchange, self._rest.group(names[0]))

    # -- sending: always in the queue's order, so that all ranks send the same bucket at the same time ------
    def _hook(self, sending: _Sending) -> Callable[[Tensor], None]:
        def count(parameter: Tensor) -> None:
            if sending.awaited:
                sending.missing -= 1
                while self._queue and self._queue[0].missing == 0:
                    self._send(self._queue.popleft())

        return count

    def _send_queued(self) -> None:
        """Also what made no call to a hook: weight gradients computed apart from the input's."""
        while self._queue:
            self._send(self._queue.popleft())

    def _send(self, sending: _Sending) -> None:
        sending.sent, sending.awaited = True, False
        sending.exchange.start()
