"""RankLinks: what a rank's decoder and its runner say to the other ranks, in their words. Made once per rank; on a
GPU the same words are said by other means."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from cumulo.errors import StoppedTogether
from cumulo.layout.serving import RankPart, even_run
from cumulo.ranks.collectives import Work
from cumulo.ranks.rank_group import THIS_HOST, RankGroup, TCPStore
from cumulo.ranks.rank_meter import RankMeter

T = TypeVar("T")
_LONGEST_COMPLAINT = 4000  # bytes
_STREAMS_AHEAD = 4  # of the next stage


@dataclass(slots=True)
class RankLinks:
    """A group of None: this rank is its only member."""

    part: RankPart
    tensor: RankGroup | None = None  # heads and width are cut among them
    data: RankGroup | None = None  # same slice, other sequences
    stage: RankGroup | None = None  # all ranks of the stage, over which experts are spread
    pipeline: RankGroup | None = None  # same slice and sequences, other layers; by stage
    meter: RankMeter | None = None
    host: str = THIS_HOST  # the address at which the others reach this one
    # Held until they have left, which gloo says only to who waits: streams, which the next stage takes in every
    # step, and tokens, which the first stage may take later.
    _streams: deque[tuple[Work, Tensor]] = field(default_factory=deque)
    _tokens: list[tuple[Work, Tensor]] = field(default_factory=list)

    # -- tensor parallel ------------------------------------------------------------------------------
    def sum_slices(self, partial: Tensor) -> Tensor:
        """What the slices of heads or width add up to, in place."""
        return partial if self.tensor is None else self.tensor.sum(partial)

    def largest_of_slices(self, own: Tensor) -> Tensor:
        """For each number, the largest that a slice has."""
        if self.tensor is None:
            return own
        return torch.stack(self.tensor.gather(own.cpu())).amax(0).to(own.device)

    def gather_vocabulary(self, own: Tensor) -> Tensor:
        """The logits of all tokens, [R, vocabulary], of which each slice has computed some columns."""
        if self.tensor is None:
            return own
        tokens, slices = self.part.whole.vocab_size, self.tensor.size
        found = self.tensor.gather(pad(own, (0, -(-tokens // slices) - own.shape[1])))
        sizes = [len(even_run(tokens, index, slices)) for index in range(slices)]
        return torch.cat([columns[:, :size] for columns, size in zip(found, sizes, strict=True)], dim=1)

    # -- agreement ------------------------------------------------------------------------------------
    def together(self, work: Callable[[], T]) -> T:
        """Every rank does its own; if one of them fails, all stop with its reason. For what a rank does alone, but
        not the others without it: nobody waits for a rank that will not come."""
        own: Exception | None = None
        try:
            result = work()
        except Exception as error:
            own = error
        if complaints := self.complaints(own):
            raise StoppedTogether("\n".join(complaints)) from own
        return result

    def complaints(self, own: Exception | None) -> list[str]:
        """Waits until all ranks are here, each with the error that it met, or none: what they complain of."""
        said = "" if own is None else f"{type(own).__name__}: {own}"
        letters = said.encode()[:_LONGEST_COMPLAINT]
        lengths = torch.zeros(self.part.layout.world)
        lengths[self.part.rank] = len(letters)
        self._sum_all(lengths)
        if not lengths.any():
            return []
        texts = torch.zeros((len(lengths), int(lengths.max())))
        texts[self.part.rank, : len(letters)] = torch.tensor(list(letters), dtype=torch.float32)
        self._sum_all(texts)
        return [
            f"rank {rank}: {bytes(texts[rank, : int(length)].int().tolist()).decode(errors='replace')}"
            for rank, length in enumerate(lengths.tolist())
            if length
        ]

    def _sum_all(self, numbers: Tensor) -> None:
        """Over all ranks, in place: over those of each stage, then over the stages."""
        for group in (self.stage, self.pipeline):
            if group is not None:
                group.sum(numbers)

    # -- data-parallel attention, expert parallel -----------------------------------------------------
    def gather_rows(self, own: Tensor, shares: tuple[int, ...]) -> Tensor:
        """The rows of all data-parallel ranks, of which each has as many as `shares` says."""
        if self.data is None:
            return own
        padded = own.new_zeros((max(shares), own.shape[1]))
        padded[: len(own)] = own
        found = self.data.gather(padded)
        return torch.cat([rows[:count] for rows, count in zip(found, shares, strict=True)])

    def sum_experts(self, partial: Tensor) -> Tensor:
        """What the experts on all ranks of the stage add up to, in place."""
        return partial if self.stage is None else self.stage.sum(partial)

    def count_routed(self, tokens: int) -> None:
        """Choices of tokens that fell on experts of this rank."""
        if self.meter is not None:
            self.meter.routed(tokens)

    def share_with_stage(self, tensor: Tensor) -> None:
        """What the stage's first rank says, in place on the others."""
        if self.stage is not None:
            self.stage.share(tensor)

    # -- pipeline -------------------------------------------------------------------------------------
    def receive_stream(self, rows: int, dtype: torch.dtype) -> Tensor:
        assert self.pipeline is not None
        stream = torch.empty((rows, self.part.whole.hidden), dtype=dtype)
        return self.pipeline.receive(stream, self.pipeline.index - 1) if rows else stream

    def send_stream(self, stream: Tensor) -> None:
        assert self.pipeline is not None
        if len(stream):
            stream = stream.contiguous()
            self._streams.append((self.pipeline.send(stream, self.pipeline.index + 1), stream))
            while len(self._streams) > _STREAMS_AHEAD:
                self._streams.popleft()[0].wait()

    def send_tokens(self, tokens: NDArray[np.int64]) -> None:
        """From the last stage, which drew them, to the first, which embeds them."""
        if self.pipeline is not None:
            told = torch.from_numpy(tokens.copy())
            self._tokens.append((self.pipeline.send(told, 0), told))

    def receive_tokens(self, count: int) -> NDArray[np.int64]:
        assert self.pipeline is not None
        tokens = torch.empty(count, dtype=torch.int64)
        return self.pipeline.receive(tokens, self.pipeline.size - 1).numpy()


def connect(
    part: RankPart,
    store: TCPStore,
    timeout_s: float,
    meter: RankMeter | None = None,
    host: str = THIS_HOST,
    collective: str = "",
) -> RankLinks:
    """This rank's links. All ranks call it; groups are made together and in one order."""
    layout, rank = part.layout, part.rank
    groups: dict[tuple[int, ...], RankGroup] = {}

    def group(members: tuple[int, ...]) -> RankGroup | None:
        if len(members) == 1:
            return None
        if members not in groups:
            name = "-".join(map(str, members))
            groups[members] = RankGroup(store, name, members, rank, timeout_s, meter, host, collective)
        return groups[members]

    return RankLinks(
        part,
        tensor=group(layout.tensor_group(rank)),
        data=group(layout.data_group(rank)),
        stage=group(layout.stage_group(rank)),
        pipeline=group(layout.pipeline_group(rank)),
        meter=meter,
        host=host,
    )
