"""The mixture of experts with gradients, and how evenly they are used. Part of `TrainingDecoder`'s layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulo.models.linear import RMSNorm
from cumulo.models.moe import ExpertRouter, Experts, FeedForward, gated
from cumulo.spec.model import ModelSpec, MoESpec
from cumulo.train.model.arithmetic import fusible
from cumulo.train.model.split import LayerSettings


class ExpertUsage(NamedTuple):
    """How this rank's tokens used the experts of a layer. A tuple, so that torch finds the tensors in it."""

    scores: Tensor  # [rows, experts]: each token's share of its scores, summed over its row; with gradients
    choices: Tensor  # [rows, experts]: how often chosen


class TrainingFeedForward(FeedForward):
    """The parameters of `FeedForward`, between the borders of a split."""

    def __init__(self, spec: ModelSpec, width: int, settings: LayerSettings) -> None:
        super().__init__(spec, width, kind=settings.kind)
        self.tensor, self.recompute, self.fused = settings.split.tensor, settings.recompute, settings.fused

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:  # type: ignore[override]
        """x and what the feed-forward adds to it."""
        if self.fused is not None and fusible(self.gate_up, self.down):
            from cumulo.train.model.fused import gated_product, normed_product

            x, hidden = normed_product(x, norm.weight, self.gate_up.weight, norm.eps, self.fused)
            return gated_product(x, hidden, self.down.weight, self.fused)
        hidden = self.recompute.operation("norm", self._widen, x, norm)
        return x + self.tensor.leave(self._narrow(hidden), self.down.bias)

    def partial(self, x: Tensor) -> Tensor:
        """Inside the region, before ranks are summed."""
        return self._narrow(self.gate_up(x))

    def _widen(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.gate_up(self.tensor.enter(norm(x)))

    def _narrow(self, hidden: Tensor) -> Tensor:
        return self.recompute.operation("activation", self._gated_down, hidden)

    def _gated_down(self, hidden: Tensor) -> Tensor:
        return self.tensor.partial(self.down, gated(hidden))


class TrainingExperts(Experts):
    """The parameters of `Experts`, for tokens that are sorted already."""

    def __init__(self, spec: ModelSpec, moe: MoESpec, settings: LayerSettings) -> None:
        super().__init__(spec, moe, kind=settings.kind)
        self.recompute = settings.recompute

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
        """x: the tokens of the first expert, of the second, ...; counts [experts]: how many each has. An expert
        without tokens has a gradient, too."""
        if x.is_cuda and x.dtype == torch.bfloat16 and not any(size % 8 for size in self.down.shape[1:]):
            return self.grouped(x, counts)
        # Unbound, not indexed: the gradient of an index would be as large as all experts together.
        weights = zip(x.split(counts.tolist()), self.gate_up.unbind(0), self.down.unbind(0), strict=True)
        return torch.cat(
            [
                self.recompute.operation("activation", _gated_product, F.linear(part, gate_up), down)
                for part, gate_up, down in weights
            ]
        )

    def grouped(self, x: Tensor, counts: Tensor) -> Tensor:
        """All experts in one kernel, and the host need not know the counts."""
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends)
        return self.recompute.operation("activation", _gated_products, hidden, self.down, ends)


def _gated_product(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(gated(hidden), weight)


def _gated_products(hidden: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(gated(hidden), weights.transpose(1, 2), offs=ends)


class TrainingMixture(nn.Module):
    """The parameters of `MixtureOfExperts`; beside the result it says how the experts were used."""

    __call__: Callable[..., tuple[Tensor, ExpertUsage]]
    shared: TrainingFeedForward | None

    def __init__(self, spec: ModelSpec, moe: MoESpec, settings: LayerSettings) -> None:
        super().__init__()
        self.moe, self.split = moe, settings.split
        self.router = ExpertRouter(spec, moe, kind=settings.kind)
        held = replace(moe, experts=moe.experts // settings.split.experts.size)
        self.experts = TrainingExperts(spec, held, settings)
        self.shared = None
        if moe.shared_hidden:
            self.shared = TrainingFeedForward(spec, moe.shared_hidden, settings)

    def forward(self, x: Tensor, norm: RMSNorm, rows: int) -> tuple[Tensor, ExpertUsage]:
        """x and what the experts add to it, and how they were used."""
        change, usage = self._change(norm(x), rows)
        return x + change, usage

    def _change(self, x: Tensor, rows: int) -> tuple[Tensor, ExpertUsage]:
        tensor = self.split.tensor
        scores = self.router.scores(x)
        weights, chosen = self.router.choose(scores)
        usage = self._usage(scores, chosen, rows)
        x, weights, chosen = tensor.enter(x), tensor.enter(weights), tensor.all_tokens(chosen)
        # No token is dropped, however many want one expert.
        own = self.split.experts.apply(self.experts, x, chosen, self.moe.experts)
        routed = (own * weights.to(x.dtype)[..., None]).sum(1)
        if self.shared is None:
            return tensor.leave(routed, None), usage
        return tensor.leave(routed + self.shared.partial(x), self.shared.down.bias), usage

    def _usage(self, scores: Tensor, chosen: Tensor, rows: int) -> ExpertUsage:
        tensor = self.split.tensor
        choices = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        return ExpertUsage(
            tensor.sum_by_row(scores / scores.sum(-1, keepdim=True), rows), tensor.sum_by_row(choices, rows)
        )


def balance_sum(usage: ExpertUsage, length: int, per_token: int) -> Tensor:
    """Σ over rows of Σ over experts of f·P: the share of choices times the mean score, 1 per row when even.

    The sequence-wise balance loss of DeepSeek-V3 (2024, equations 17 to 20). Over each sequence, not over the
    batch, so that the loss of a batch is the sum over its parts, however they are spread over devices: when a
    sequence is spread, too, its choices are those of all its tokens and its scores those of this rank's.
    """
    experts = usage.scores.shape[-1]
    share = usage.choices * (experts / (length * per_token))  # f
    return (share * (usage.scores / length)).sum()
