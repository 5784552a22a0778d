"""Expert parallelism: tokens travel to the ranks that hold their experts and back (Lepikhin et al. 2020, GShard).
The expert side of a `Split`.

There is no capacity: a rank takes as many tokens as are sent to it and none is dropped, so that the result is that
of one process.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulo.ranks.collectives import all_to_all
from cumulo.ranks.differentiable import exchanged
from cumulo.ranks.groups import Group

ApplyExperts = Callable[[Tensor, Tensor], Tensor]  # tokens sorted by expert, how many each expert has


@dataclass(frozen=True, slots=True, eq=False)
class ByExpert:
    """The (token, choice) pairs of a batch, sorted by expert: each expert's tokens are one run."""

    pairs: Tensor  # [T · k], numbers of pairs
    counts: Tensor  # [experts]
    per_token: int

    @classmethod
    def sort(cls, chosen: Tensor, experts: int) -> "ByExpert":
        flat = chosen.flatten()
        counts = torch.bincount(flat, minlength=experts)
        return cls(flat.argsort(stable=True), counts, chosen.shape[1])

    def inputs(self, x: Tensor) -> Tensor:
        return x[self.pairs // self.per_token]

    def in_order_of_tokens(self, results: Tensor) -> Tensor:
        """[T · k, H] sorted by expert -> [T, k, H]."""
        return results[inverse(self.pairs)].view(-1, self.per_token, results.shape[-1])


def inverse(order: Tensor) -> Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class AllExperts:
    """This rank has all experts."""

    size = 1

    def apply(self, experts: ApplyExperts, x: Tensor, chosen: Tensor, total: int) -> Tensor:
        """Each token's experts, of `total`, wherever they are: x [T, H], chosen [T, k] -> results [T, k, H]."""
        order = ByExpert.sort(chosen, total)
        return order.in_order_of_tokens(experts(order.inputs(x), order.counts))


class ExpertParallel(AllExperts):
    """Rank r of the group holds the r-th run of experts, or of the order they were placed in."""

    def __init__(self, group: Group) -> None:
        self.group, self.size = group, group.size()
        self._places: dict[ApplyExperts, Tensor] = {}  # of each layer's experts: where each one is

    def place(self, experts: ApplyExperts, order: Tensor) -> None:
        """From now on these experts lie in another order over the ranks."""
        self._places[experts] = inverse(order)

    def apply(self, experts: ApplyExperts, x: Tensor, chosen: Tensor, total: int) -> Tensor:
        places = self._places.get(experts)
        order = ByExpert.sort(chosen if places is None else places[chosen], total)
        sent = order.counts.view(self.size, -1)  # [rank, its experts]
        received = torch.empty_like(sent)
        all_to_all(received, sent, self.group)
        # One wait for the device: how much goes to whom and comes from whom.
        sends, receives = torch.stack((sent.sum(1), received.sum(1))).tolist()
        arrived = exchanged(order.inputs(x), sends, receives, self.group)
        # What arrived lies by sender, then by expert.
        own = torch.arange(sent.shape[1], device=x.device).repeat(self.size)
        by_expert = own.repeat_interleave(received.flatten()).argsort(stable=True)
        results = experts(arrived[by_expert], received.sum(0))
        returned = exchanged(results[inverse(by_expert)], receives, sends, self.group)
        return order.in_order_of_tokens(returned)
